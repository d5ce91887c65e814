"""Runs that are stalled on purpose: the root of what they wait for is named while they stand, and when they end."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.process.run_process import ROOT, TINY, ended, environment, gone_within, of_kind, start, wait_for
from turnout.cli.main import main

WORDS = ("--engine-threads", "1", "--no-plots", "--skip-eval-before-train", "--stall-warning-s", "2")
LONG = ("--rollout-max-response-len", "400", "--rollout-min-response-len", "400")


def stalled(run: Path, root: str) -> dict[str, Any]:
    """What waits.json holds once it tells of a stall at this root."""
    path = run / "waits.json"
    row = json.loads(path.read_text()) if path.exists() else {}
    stands = row.get("stalled") and row["phase"] != "start"
    return row if stands and row["chain"][-1]["on"].startswith(root) else {}


def doctor(run: Path) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = main(["doctor", str(run)])
    return status, out.getvalue().split("\n")[0]


def test_an_engine_that_stands_still(tmp_path: Path) -> None:
    """It is named with the state of its process; the wait for the groups ends the run, and says so."""
    run = tmp_path / "run"
    limits = ("--rollout-request-timeout-s", "11", "--reward-timeout-s", "1", "--rollout-timeout-s", "13")
    words = (*WORDS, *LONG, *limits, "--rollout-health-check-timeout", "300")
    process = start("train", str(TINY), "--run-dir", str(run), *words)
    wait_for("a rollout", lambda: of_kind(run, "GroupTaken"), process)
    pid = of_kind(run, "EngineReady")[0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    row = wait_for("a stall", lambda: stalled(run, "engine engine-0"), process)
    assert [wait["who"] for wait in row["chain"][:2]] == ["run", "rollout"]
    status, line = doctor(run)
    assert status == 3 and line.startswith("run -> rollout -> group g")
    assert "-> engine engine-0: a token, for" in line and f"process {pid} is stopped (SIGSTOP)" in line
    status, out, err = ended(process)
    assert status == 7 and "for the groups of step 0" in err and "-> engine engine-0: a token" in err
    assert out.count("nothing has moved for") == len(of_kind(run, "RunStalled"))
    summary = json.loads((run / "summary.json").read_text())
    assert "-> engine engine-0: a token" in summary["reason"] and summary["groups"]["lost"] == 0
    assert doctor(run) == (1, f"failed: {summary['reason']}")
    assert gone_within(run, 5) == []


@pytest.mark.parametrize(
    "words, root, frame",
    [
        (("--train-step-timeout-s", "8"), "trainer", "stand_still"),
        (("--custom-rm-path", "tests.hanging:hangs", "--grace-s", "1"),
         "reward tests.hanging:hangs", "hangs"),
    ],
    ids=["trainer", "reward"],
)  # fmt: skip
def test_a_call_that_never_ends(tmp_path: Path, words: tuple[str, ...], root: str, frame: str) -> None:
    """The line of code in which it stands is told; the process ends though its thread does not."""
    run = tmp_path / "run"
    program = [
        sys.executable,
        "-m",
        "tests.hanging",
        "train",
        str(TINY),
        "--run-dir",
        str(run),
        *WORDS,
        *words,
    ]
    process = subprocess.Popen(
        program, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for("a stall", lambda: stalled(run, root), process)
    status, line = doctor(run)
    assert status == 3 and f"-> {root}: " in line and f" {frame}" in line
    if root != "trainer":  # whose call has a deadline of its own
        process.terminate()
    _, _, err = ended(process)
    assert f"-> {root}: " in err and "Traceback" not in err
    reason = json.loads((run / "summary.json").read_text())["reason"]
    assert f"-> {root}: " in reason and f" {frame}" in reason
    assert gone_within(run, 5) == []


def test_a_reward_that_holds_the_event_loop(tmp_path: Path) -> None:
    """Nothing of the run can tell any more but a thread; after SIGKILL what it told last is still there."""
    run = tmp_path / "run"
    words = (*WORDS, "--custom-rm-path", "tests.hanging:holds_the_loop")
    process = start("train", str(TINY), "--run-dir", str(run), *words)
    wait_for("a stall", lambda: stalled(run, "event loop"), process)
    status, line = doctor(run)
    assert status == 3 and "a call to return: hanging.py" in line and "holds_the_loop" in line
    process.kill()
    ended(process)
    status, line = doctor(run)
    assert (
        status == 1 and f"process {process.pid} is gone, without an end" in line and "holds_the_loop" in line
    )
    assert gone_within(run, 10) == []
