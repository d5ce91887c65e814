"""`turnout train` with groups that are cut and go on in the next rollout, and with an engine that is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.process.run_process import TINY, ended, of_kind, start, train, wait_for
from turnout.rollout.group_machine import GroupState
from turnout.rollout.ledger_check import problems
from turnout.rollout.ledger_read import LedgerReader

THREADS = ("--trainer-threads", "1", "--no-plots")


def audited(folder: Path) -> dict[str, Any]:
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["audit"]["failed"] == 0, summary["audit"]["details"]
    assert summary["groups"]["lost"] == 0
    assert list(problems(LedgerReader.of(folder / "ledger.sqlite"))) == []
    return summary


def test_partial_rollouts_in_sync(tmp_path: Path) -> None:
    """Six groups of which two train; ten requests fit the engine, so that some are cut in the middle."""
    run = tmp_path / "run"
    sizes = ("--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--num-rollout", "5")
    words = ("--over-sampling-batch-size", "6", "--partial-rollout", "--engine-max-running-requests", "10")
    long = ("--rollout-max-response-len", "64", "--token-journal-interval", "4")
    status, _, err = train(run, *THREADS, *sizes, *words, *long)
    assert status == 0, err
    summary = audited(run)
    resumed = of_kind(run, "GroupResumed")
    assert summary["partial_resumes"] == sum(row["samples"] for row in resumed) > 0
    trained = {row["group"]: row for row in of_kind(run, "GroupTrained")}
    assert len(trained) == 10 and 0 < summary["lag"]["max"] <= 2
    on_tokens = {row["group"] for row in resumed if row["tokens"]}
    both = [row for row in trained.values() if row["group"] in on_tokens and len(row["versions"]) > 1]
    assert both, "a group that was cut with tokens trained with what two versions made"
    assert not [row for row in of_kind(run, "GroupDropped") if row["reason"] == "surplus"]


def stopped_within_a_sample(run: Path, pid: int) -> bool:
    """Holds the engine; whether samples of it are under way then, with tokens. Else lets it go on."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.5)  # what it had sent is in the ledger then
    ledger = LedgerReader.of(run / "ledger.sqlite")
    try:
        for row in ledger.open_rows():
            pieces = ledger.pieces(row.group_id) if row.state is GroupState.INFLIGHT else []
            ended = {piece["member"] for piece in pieces if piece["finish"] != "abort"}
            if any(p["member"] not in ended and p["engines"][0][1] == "engine-1" for p in pieces):
                return True
    finally:
        ledger.close()
    os.kill(pid, signal.SIGCONT)
    return False


def test_an_engine_is_killed_in_async_and_its_samples_go_on_elsewhere(tmp_path: Path) -> None:
    run = tmp_path / "run"
    engines = ("--rollout-num-engines", "2", "--min-engines", "1", "--engine-threads", "1")
    sizes = ("--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--num-rollout", "8")
    words = ("--schedule", "async", "--rollout-max-response-len", "200", "--token-journal-interval", "8")
    process = start("train", str(TINY), "--run-dir", str(run), *THREADS, *engines, *sizes, *words)
    try:
        wait_for("two steps", lambda: len(of_kind(run, "GroupTrained")) >= 4, process)
        pid = next(row["pid"] for row in of_kind(run, "EngineReady") if row["engine"] == "engine-1")
        wait_for("a sample in the middle on engine-1", lambda: stopped_within_a_sample(run, pid), process)
        os.kill(pid, signal.SIGKILL)
        status, _, err = ended(process)
    finally:
        process.kill()
    assert status == 0, err
    summary = audited(run)
    assert summary["steps"] == 8 and summary["lag"]["max"] <= 2
    assert [row["engine"] for row in of_kind(run, "EngineLost")] == ["engine-1"]
    ledger = LedgerReader.of(run / "ledger.sqlite")
    made_by = [
        [name for _, name in piece["engines"]]
        for row in of_kind(run, "GroupCompleted")
        for piece in ledger.pieces(row["group"])
    ]
    assert ["engine-1", "engine-0"] in made_by, "a trajectory that both engines made"
