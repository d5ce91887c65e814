"""The commands of docs/tour.md, run as they stand there; and on the run that they leave, those of other pages that
tests/doc_commands.py has run."""

from __future__ import annotations

import re
import shlex
import signal
import sqlite3
import subprocess
import threading
from pathlib import Path

import pytest

from tests.doc_commands import FENCE, TOUR, Command, all_commands, commands_of, words_of
from tests.process.run_process import ROOT, TINY, ended, start
from turnout.cli.main import main

DEADLINE_S = 600.0
REFUSED = "--rollout-temprature"
RUN_HERE = [command for command in all_commands() if command.rule is not None and command.rule.how == "run"]
# what a page says -> what is run: a run of 12 steps, few worlds
NAMES = {
    r"RUN_DIR|runs/[a-z]+-\d+|(?<=doctor )trouble": "{run}",
    r"RUN\.yaml": str(TINY),
    r"report\.json": "{run}/report.json",
    r"--step \d+": "--step 3",
    r"--token (\d+:\d+):\d+": r"--token \1:0",
    r"engine-\d": "engine-0",
    r"--seeds \d+": "--seeds 2 --processes 1",
}
STATUS = {"--sabotage": (0, 1), "layout=megatron": (0, 5)}  # else 0


def until_it_serves(process: subprocess.Popen[str]) -> None:
    """Ends a command that serves as Ctrl-C does, once it has said where."""
    watch = threading.Timer(DEADLINE_S, process.kill)
    watch.start()
    assert process.stdout is not None
    assert "http://127.0.0.1:" in process.stdout.readline()
    watch.cancel()
    process.send_signal(signal.SIGINT)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the runs of the tour, after its last command."""
    folder = tmp_path_factory.mktemp("runs")
    commands = [command.text for command in commands_of(ROOT / TOUR)]
    assert len(commands) >= 6 and any(REFUSED in command for command in commands)
    here = ROOT
    for command in commands:
        program, *words = shlex.split(command.replace("runs/", f"{folder}/"))
        if program == "cd":
            here = here / words[0]
            continue
        assert program == "turnout", command
        process = start(*words, cwd=here)
        if words[0] == "dash":
            until_it_serves(process)
        status, out, err = ended(process, DEADLINE_S)
        if REFUSED in command:
            assert status == 2 and "3 faults" in err, err
        else:
            assert status == 0, f"{command}\n{out[-1000:]}\n{err[-1000:]}"
    return folder


def test_every_command_of_the_tour_does_what_it_says(runs: Path) -> None:
    assert (runs / "tour" / "summary.json").is_file() and (runs / "det" / "summary.json").is_file()


@pytest.mark.parametrize("command", RUN_HERE, ids=str)
def test_a_command_of_another_page_works(
    command: Command, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = command.text
    for said, run in NAMES.items():
        text = re.sub(said, run.replace("{run}", str(runs / "tour")), text)
    monkeypatch.chdir(ROOT)
    program, *words = words_of(text)
    if program == "sqlite3":
        with sqlite3.connect(f"file:{words[0]}?mode=ro", uri=True) as database:
            assert database.execute(words[1]).fetchall()
        return
    statuses = next((status for part, status in STATUS.items() if part in text), (0,))
    assert main(words) in statuses


def test_the_ledger_is_read_as_its_page_says(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "guides" / "ledger.md").read_text(encoding="utf-8")
    (block,) = [body for language, body in FENCE.findall(page) if language == "python"]
    exec(block.replace("RUN_DIR", str(runs / "tour")), {})
    assert len(capsys.readouterr().out.splitlines()) == 8
