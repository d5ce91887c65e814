"""`turnout train` where trainer and engine share memory: the examples, and an engine that is killed in its turn."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.process.run_process import ROOT, ended, of_kind, start, wait_for, whole
from turnout.observe.metrics import read_metrics
from turnout.placement.footprint import enough

FAST = ("--engine-threads", "1", "--trainer-threads", "1", "--no-plots", "--skip-eval-before-train")
LARGE = (
    "--engine-max-total-tokens",
    "131072",
)  # what an engine gives back is far above what it takes otherwise


def begun(name: str, run: Path, *words: str) -> Any:
    return start("train", str(ROOT / "examples" / f"{name}.yaml"), "--run-dir", str(run), *FAST, *words)


def equal_everywhere(run: Path, status: int, err: str) -> dict[str, Any]:
    """The summary of a whole run in which each version had one root everywhere."""
    summary = whole(run, status, err)
    roots = {row["version"]: row["root"] for row in of_kind(run, "VersionPublished")}
    attested = {row["version"]: row["root"] for row in of_kind(run, "VersionAttested")}
    assert roots.items() <= attested.items() and len(set(roots.values())) > 2
    return summary


@pytest.mark.parametrize("name", ["colocated", "colocated_partial", "colocated_async"])
def test_the_example_runs_to_its_end_with_equal_digests(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    saves = (*LARGE, "--num-rollout", "3", "--save-interval", "1", "--save", str(tmp_path / "saved"))
    status, _, err = ended(begun(name, run, *saves))
    summary = equal_everywhere(run, status, err)
    released = of_kind(run, "MemoryReleased")
    rows = [row for _, row in read_metrics(run / "metrics.jsonl") if "rollout/reward_mean" in row]
    assert len(rows) == 3
    if name == "colocated_async":
        assert released == [] and "memory/released_bytes" not in rows[0]
        return
    assert [row["who"] for row in released] == ["trainer", *["engine-0", "trainer"] * 3]
    assert all(enough(row["asked"], row["fell"]) for row in released)
    of_engine = [row for row in released if row["who"] == "engine-0"]
    assert all(row["fell"] >= 0.9 * row["asked"] > 25 << 20 for row in of_engine), of_engine
    assert all(row["memory/released_bytes"] and row["memory/offloaded_bytes"] for row in rows)
    assert list((run / "offload").iterdir()) == [], "the trainer's file has no name"
    if name == "colocated_partial":
        assert summary["partial_resumes"] > 0


def test_an_engine_that_is_killed_in_the_trainers_turn_comes_again_in_its_own(tmp_path: Path) -> None:
    run = tmp_path / "run"
    patient = ("--use-fault-tolerance", "--rollout-health-check-interval", "0.3", "--num-rollout", "3")
    process = begun("colocated", run, *patient)
    wait_for("an engine to be released", lambda: len(of_kind(run, "MemoryReleased")) > 1, process)
    os.kill(of_kind(run, "EngineReady")[0]["pid"], signal.SIGKILL)
    status, _, err = ended(process)
    equal_everywhere(run, status, err)
    assert [row["engine"] for row in of_kind(run, "EngineLost")] == ["engine-0"]
    assert len(of_kind(run, "EngineReady")) == 2


def test_frozen_models_come_back_from_their_copies_and_so_does_one_that_is_killed_meanwhile(
    tmp_path: Path,
) -> None:
    """A reward model and a reference give back too, and attest after each turn of the trainer what they held at
    first; in the second of these the reward model is killed, and after that the controller, which leaves both."""
    run = tmp_path / "run"
    words = ("--offload", "--update-weight-transport", "tensor", *LARGE, "--engine-linger", "60")
    patient = ("--use-fault-tolerance", "--rollout-health-check-interval", "0.3", "--save-interval", "1")
    words = (*words, *patient, "--num-rollout", "5")
    process = begun("reward_model", run, *words)
    judge = "reward.regular1-0"
    given = lambda: [row for row in of_kind(run, "MemoryReleased") if row["who"] == judge]  # noqa: E731
    wait_for("the reward model to be released twice", lambda: len(given()) > 1, process)
    first = next(row for row in of_kind(run, "EngineReady") if row["engine"] == judge)
    os.kill(first["pid"], signal.SIGKILL)
    wait_for("it to be released again", lambda: len(given()) > 2, process)
    process.kill()
    process.communicate()
    status, _, err = ended(begun("reward_model", run, *words))
    summary = equal_everywhere(run, status, err)
    assert err.count("is taken over from the controller before") == 3
    assert len({row["pid"] for row in of_kind(run, "EngineReady") if row["engine"] == judge}) == 2
    for name in (judge, "reference.regular1-0"):
        attested = [row for row in of_kind(run, "ModelAttested") if row["engine"] == name]
        assert len(attested) > 5 and {(row["root"], row["level"]) for row in attested} == {
            (attested[0]["root"], "memory")
        }
        assert all(told["stayed"] for told in summary["models"][name.partition(".")[0]].values())


def test_an_engine_that_a_killed_controller_left_released_serves_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("--engine-linger", "60", "--save-interval", "1", "--num-rollout", "3")
    process = begun("colocated", run, *words)
    given = lambda: [row for row in of_kind(run, "MemoryReleased") if row["who"] == "engine-0"]  # noqa: E731
    wait_for("an engine to be released again", lambda: len(given()) > 1, process)
    process.kill()
    process.communicate()
    status, _, err = ended(begun("colocated", run, *words))
    equal_everywhere(run, status, err)
    assert "is taken over from the controller before" in err
    assert len({row["pid"] for row in of_kind(run, "EngineReady")}) == 1
