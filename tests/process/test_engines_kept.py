"""`--engine-linger`: engines outlive a killed controller for a while, and the run that goes on takes them over."""

from __future__ import annotations

import json
from pathlib import Path

from tests.process.run_process import events, gone_within, of_kind, processes_of
from tests.resume_kills import Run, check_end, story


def pids(folder: Path) -> list[dict[str, int]]:
    """Of the engines, by incarnation."""
    found: list[dict[str, int]] = []
    for row in events(folder):
        if row["event"] == "RunStarted":
            found.append({})
        elif row["event"] == "EngineReady":
            found[-1][row["engine"]] = row["pid"]
    return found


def test_a_run_that_goes_on_keeps_its_engines_and_equals_one_that_nobody_killed(tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole", "async")
    whole.finish()
    run, linger = Run(tmp_path / "run", "async"), ("--engine-linger", "60")
    run.kill("between", 4, 0.02, *linger)
    assert len(processes_of(run.folder)) == 2, "the engines are left"
    run.finish(*linger)
    check_end(run)
    first, second = pids(run.folder)
    assert first == second and len(first) == 2, "the same processes, and no other"
    assert story(run) == story(whole)
    assert "is taken over" in run.words()
    assert gone_within(run.folder, 5) == []
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["audit"]["failed"] == 0, summary["audit"]


def test_engines_of_other_options_or_that_nobody_takes_over_end(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "async")
    run.kill("between", 4, 0.02, "--engine-linger", "60")
    run.kill("between", 6, 0.02, "--engine-linger", "3", "--rollout-num-engines", "1")
    words = run.words()
    assert "engine-0" in words and "it was started with other options" in words
    assert "engine-1" in words and "this incarnation has no use for it" in words
    assert len(processes_of(run.folder)) == 1, "the one engine of the second life"
    assert gone_within(run.folder, 15) == [], "it waits for 3 s"
    assert len(of_kind(run.folder, "RunStarted")) == 2
