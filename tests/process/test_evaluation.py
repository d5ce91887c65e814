"""Evaluation on pinned versions with real engines: beside training, and of kept versions after the run (ASY-14)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.process.run_process import ended, gone_within, of_kind, processes_of, start, train

PLAIN = ["--deterministic", "--trainer-threads", "1", "--num-rollout", "2"]
DELTA = ["--update-weight-mode", "delta"]


def points(run_dir: Path) -> dict[tuple[str, int], tuple[str, str, float]]:
    """(set, step) -> (version, digest, score)."""
    return {
        (row["name"], row["step"]): (row["version"], row["digest"], row["score"])
        for row in of_kind(run_dir, "EvalDone")
    }


@pytest.fixture(scope="module")
def in_line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("eval") / "shared"
    status, out, err = train(run_dir, *PLAIN, *DELTA)
    assert status == 0, (out, err)
    return run_dir


def test_asy_14_kept_versions_are_scored_after_the_run_as_they_would_have_been_in_it(
    in_line: Path, tmp_path: Path
) -> None:
    """Deltas: a version is put together from the base checkpoint and the chain; every bit is what engines held."""
    run_dir = tmp_path / "kept"
    status, out, err = train(run_dir, *PLAIN, *DELTA, "--eval-mode", "checkpoint")
    assert status == 0, (out, err)
    assert points(run_dir) == points(in_line)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "eval/score" in row] == [0, 2]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert [row["step"] for row in summary["evaluations"] if row["name"] == "held-out"] == [0, 2]
    assert processes_of(run_dir) == []


GROUPS = """
sglang:
  - name: actor
    server_groups: [{worker_type: regular, num_gpus: 1}]
  - name: judge
    update_weights: false
    server_groups: [{worker_type: regular, num_gpus: 1}]
"""


def test_engines_that_only_evaluate_make_the_points_that_the_run_would(in_line: Path, tmp_path: Path) -> None:
    """They follow the versions that are due, as deltas, and no update asks them."""
    run_dir, groups = tmp_path / "apart", tmp_path / "groups.yaml"
    groups.write_text(GROUPS)
    words = ["--eval-mode", "dedicated", "--eval-model", "judge", "--sglang-config", str(groups)]
    status, out, err = train(run_dir, *PLAIN, *DELTA, *words, "--eval-interval", "1")
    assert status == 0, (out, err)
    made = points(run_dir)
    assert {key: made[key] for key in points(in_line)} == points(in_line)
    assert {step for _, step in made} == {0, 1, 2} and of_kind(run_dir, "EvalSkipped") == []
    required = {name for row in of_kind(run_dir, "VersionPublished") for name in row["required"]}
    assert required == {"actor.regular1-0"}
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert sorted(row["step"] for row in rows if "eval/score" in row) == [0, 1, 2]
    assert gone_within(run_dir, 5) == []


def test_a_kept_version_is_scored_by_hand_with_the_same_result(in_line: Path, tmp_path: Path) -> None:
    target = tmp_path / "scores.json"
    words = ["eval", str(in_line / "config.json"), "--run-dir", str(in_line), "--version", "v000002"]
    status, out, err = ended(start(*words, "--json", str(target)))
    assert status == 0, (out, err)
    rows: list[dict[str, Any]] = json.loads(target.read_text())
    made = {row["name"]: (row["version"], row["digest"], row["score"]) for row in rows}
    assert made["held-out"] == points(in_line)["held-out", 2]
    status, _, err = ended(start(*words[:-1], "v000009"))
    assert (status, "there is no version 9 any more" in err) == (5, True)


def test_asy_14_beside_training_in_async_every_point_is_of_the_version_of_its_step(tmp_path: Path) -> None:
    run_dir = tmp_path / "async"
    words = ["--schedule", "async", "--eval-interval", "1", "--num-rollout", "2"]
    status, out, err = train(run_dir, *words)
    assert status == 0, (out, err)
    steps = {row["version"]: row["step"] for row in of_kind(run_dir, "VersionPublished")}
    found = {key: version for key, (version, _, _) in points(run_dir).items() if key[0] == "held-out"}
    assert {step for _, step in found} == {0, 1, 2}
    assert all(steps[version] == step for (_, step), version in found.items() if step)
    assert of_kind(run_dir, "EvalSkipped") == []
