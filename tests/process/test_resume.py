"""Runs that are killed, stopped or taken over, as processes: they go on as if nothing had happened.

`python -m tests.resume_kills` does many more kills (benchmarks/results/resume_kills.json).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from tests.process.run_process import events, gone_within, of_kind, wait_for
from tests.resume_kills import DEADLINE_S, STEPS, Run, check_end, story

DELTA = ("--update-weight-mode", "delta")
ONE = ("--rollout-num-engines", "1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that nobody killed: deterministic async, full versions, two engines."""
    run = Run(tmp_path_factory.mktemp("whole") / "run", "async")
    run.finish()
    return run


def test_a_run_killed_and_stopped_resumed_with_other_engines_by_deltas_equals_one_that_nobody_killed(
    whole: Run, tmp_path: Path
) -> None:
    """Checkpoint at 3, crash after 5; then one engine and SIGTERM; then two engines, with checkpoints written
    beside training, to the end."""
    run = Run(tmp_path / "run", "async")
    run.kill("between", 4, 0.02, *DELTA)
    assert run.steps_done >= 5
    assert gone_within(run.folder, 10) == []
    process = run.start(*DELTA, *ONE)
    wait_for("a step of the second life", lambda: restarted(run.folder) >= 6, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 143, run.words()
    assert gone_within(run.folder, 10) == []
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["status"] == "interrupted" and summary["audit"]["failed"] == 0, summary
    done = of_kind(run.folder, "StepTrained")[-1]["step"] + 1
    assert (run.folder / "checkpoints" / f"step_{done:06d}" / "state.json").is_file()
    run.finish(*DELTA, "--async-save")
    check_end(run)
    assert story(run) == story(whole)
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["incarnations"] == 3 and summary["steps"] == STEPS and summary["reason"] == ""
    assert summary["weight_versions_committed"] == len(of_kind(run.folder, "VersionCommitted")) - 3
    starts = of_kind(run.folder, "RunStarted")
    assert [row["incarnation"] for row in starts] == [0, 1, 2]
    assert [row["resumed_at"] for row in starts] == [None, 3, done]
    assert len({row["run_id"] for row in starts}) == 1
    first = next(row for row in of_kind(run.folder, "VersionPublished") if row["incarnation"] == 1)
    assert first["encoding"] == "" and first["step"] == 3, "restored weights go out in full, before all else"
    counters = [row["counter"] for row in of_kind(run.folder, "VersionPublished")]
    assert counters == sorted(set(counters))


def restarted(folder: Path) -> int:
    """Train steps done in the second life of a run."""
    rows = events(folder)
    begins = [at for at, row in enumerate(rows) if row["event"] == "RunStarted"]
    if len(begins) < 2:
        return 0
    return max((row["step"] + 1 for row in rows[begins[1] :] if row["event"] == "StepTrained"), default=0)


def test_another_configuration_is_refused_and_nothing_is_touched(whole: Run) -> None:
    before = contents(whole.folder)
    process = whole.start("--seed", "5")
    assert process.wait(DEADLINE_S) == 2
    assert "--seed = 5: the run in --run-dir has 1234" in whole.words()
    assert contents(whole.folder) == before


def test_an_old_controller_that_wakes_up_beside_its_successor_does_no_harm(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "sync")
    old = run.start()
    try:
        wait_for("a checkpoint", lambda: run.steps_done >= 4, old)  # type: ignore[arg-type]
        os.kill(old.pid, signal.SIGSTOP)
        with contextlib.closing(sqlite3.connect(run.folder / "ledger.sqlite")) as ledger:
            ledger.execute("UPDATE owner SET expiry = 0")  # its lease of a minute is over
            ledger.commit()
        run.finish()
        check_end(run)
        before = contents(run.folder)
        os.kill(old.pid, signal.SIGCONT)
        status = old.wait(DEADLINE_S)
    finally:
        old.kill()
        old.wait()
    assert status not in (0, -signal.SIGKILL), run.words()
    assert "incarnation 1" in run.words()
    time.sleep(0.5)
    assert contents(run.folder) == before
    assert gone_within(run.folder, 10) == []


def contents(folder: Path) -> dict[str, str]:
    """A digest of every file that a run's readers look at."""
    names = ("events.jsonl", "metrics.jsonl", "summary.json", "run.json", "config.json")
    found = [folder / name for name in names]
    found += [p for part in ("checkpoints", "weights") for p in (folder / part).rglob("*") if p.is_file()]
    with contextlib.closing(sqlite3.connect(f"file:{folder / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
        rows = ledger.execute("SELECT * FROM groups ORDER BY group_id").fetchall()
    digests = {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}
    return digests | {"groups": repr(rows)}
