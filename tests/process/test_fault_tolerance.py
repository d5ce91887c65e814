"""`--use-fault-tolerance` with real kills: engines come again, hold the current version, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.held_reward import VARIABLE
from tests.process.run_process import TINY, ended, gone_within, of_kind, start, wait_for, whole

WORDS = (
    "--use-fault-tolerance", "--rollout-num-engines", "2", "--engine-threads", "1", "--no-plots",
    "--skip-eval-before-train", "--rollout-max-response-len", "160", "--rollout-min-response-len", "160",
    "--rollout-health-check-interval", "0.3", "--rollout-health-check-timeout", "2",
)  # fmt: skip
HELD = "tests.held_reward:held"


def pids(run: Path) -> dict[str, int]:
    """Of the newest life of each engine."""
    return {row["engine"]: row["pid"] for row in of_kind(run, "EngineReady")}


@pytest.mark.parametrize(
    "schedule, number",
    [("sync", signal.SIGKILL), ("async", signal.SIGKILL), ("async", signal.SIGSTOP)],
    ids=["sync-killed", "async-killed", "async-stopped"],
)
def test_rtr_14_an_engine_comes_again_and_holds_the_current_version(
    tmp_path: Path, schedule: str, number: signal.Signals
) -> None:
    run, go = tmp_path / "run", tmp_path / "go"
    words = ("--schedule", schedule, "--num-rollout", "6", *WORDS, "--custom-rm-path", HELD)
    process = start("train", str(TINY), "--run-dir", str(run), *words, **{VARIABLE: str(go)})
    wait_for("a version of the run", lambda: of_kind(run, "VersionPublished"), process)
    os.kill(pids(run)["engine-1"], number)
    wait_for("the engine's death", lambda: of_kind(run, "EngineLost"), process)
    wait_for("its next life", lambda: len(of_kind(run, "EngineReady")) == 3, process)
    go.touch()
    status, out, err = ended(process)
    whole(run, status, err)
    assert [row["engine"] for row in of_kind(run, "EngineLost")] == ["engine-1"]
    assert of_kind(run, "EngineReady")[-1]["version"] in ("none", "default"), "it has to attest first"
    last = of_kind(run, "VersionPublished")[-1]["version"]
    attested = {row["engine"] for row in of_kind(run, "VersionAttested") if row["version"] == last}
    assert attested == {"engine-0", "engine-1"}
    assert "it is started again in 1 s" in out + err and "engine-1 serves again" in out + err
    assert "left out" not in err, "an engine that is gone is asked in no update"


def test_rtr_10_all_engines_dead_at_once_are_waited_for(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(
        "train", str(TINY), "--run-dir", str(run), "--schedule", "async", "--num-rollout", "4", *WORDS
    )
    wait_for("a version of the run", lambda: of_kind(run, "VersionPublished"), process)
    for pid in pids(run).values():
        os.kill(pid, signal.SIGKILL)
    status, _, err = ended(process)
    whole(run, status, err)
    assert {row["engine"] for row in of_kind(run, "EngineLost")} == {"engine-0", "engine-1"}
    assert len(of_kind(run, "StepTrained")) == 4


def test_one_that_ends_again_and_again_is_given_up(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("--engine-restarts", "1", "--min-engines", "2", "--num-rollout", "50")
    process = start("train", str(TINY), "--run-dir", str(run), *WORDS, *words)
    wait_for("a version of the run", lambda: of_kind(run, "VersionPublished"), process)
    os.kill(pids(run)["engine-1"], signal.SIGKILL)
    wait_for("its next life", lambda: len(of_kind(run, "EngineReady")) == 3, process)
    os.kill(pids(run)["engine-1"], signal.SIGKILL)
    status, _, err = ended(process)
    assert status == 4 and "engine-1" in err and "started again 1 times" in err
    assert gone_within(run, 5) == []
    summary = json.loads((run / "summary.json").read_text())
    assert (
        summary["status"] == "failed" and summary["groups"]["lost"] == 0 and summary["audit"]["failed"] == 0
    )
