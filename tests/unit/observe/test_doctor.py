"""What `turnout doctor` says of a run's directory."""

from __future__ import annotations

import json
import os
import socket
import time

import pytest

from turnout.cli.main import main
from turnout.core.errors import ConfigError
from turnout.observe.doctor import DEAD, MOVES, STALLED, Seen, read_waits, verdict

WAITS = {"at": 100.0, "pid": 7, "host": "h", "line": "run -> train", "stalled": False}


@pytest.mark.parametrize(
    "waits, end, seen, status, words",
    [
        (WAITS, {}, Seen(101, True, "S"), MOVES, "run -> train"),
        ({**WAITS, "stalled": True}, {}, Seen(101, True, "R"), STALLED, "run -> train"),
        (WAITS, {}, Seen(101, True, ""), DEAD, "process 7 is gone, without an end; 1 s ago: run -> train"),
        (WAITS, {}, Seen(101, True, "Z"), DEAD, "gone"),
        (WAITS, {}, Seen(101, True, "T"), STALLED, "is stopped (SIGSTOP)"),
        (WAITS, {}, Seen(131, True, "S"), STALLED, "event loop stands still) for 31 s"),
        (WAITS, {}, Seen(131, False, ""), STALLED, "on h has told nothing for 31 s"),
        (WAITS, {}, Seen(101, False, ""), MOVES, "run -> train"),
        ({}, {}, Seen(101, False, ""), MOVES, "not begun"),
        (WAITS, {"status": "finished", "reason": ""}, Seen(999, True, ""), MOVES, "finished"),
        (WAITS, {"status": "paused", "reason": "--max-wall-time 5"}, Seen(9, True, ""), MOVES, "paused: --max"),
        (WAITS, {"status": "failed", "reason": "waited"}, Seen(999, True, ""), DEAD, "failed: waited"),
    ],
)  # fmt: skip
def test_the_verdict(waits, end, seen, status, words):
    found = verdict(waits, end, seen)
    assert found.status == status and words in found.text


def test_the_command_reads_a_runs_directory(tmp_path, capsys):
    with pytest.raises(ConfigError, match="holds no run"):
        read_waits(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    assert main(["doctor", str(tmp_path)]) == 0
    row = {**WAITS, "host": socket.gethostname(), "pid": os.getpid(), "at": time.time(), "stalled": True}
    (tmp_path / "waits.json").write_text(json.dumps(row))
    capsys.readouterr()
    assert main(["doctor", str(tmp_path), "--json"]) == STALLED
    told = json.loads(capsys.readouterr().out)
    assert told["status"] == STALLED and told["text"] == "run -> train" and told["pid"] == os.getpid()
    (tmp_path / "summary.json").write_text('{"status": "finished"}')
    assert main(["doctor", str(tmp_path)]) == 0
