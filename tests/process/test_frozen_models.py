"""Models that are served beside the one that is trained: they stay, rewards reach them by name, and come again."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.process.run_process import ROOT, ended, gone_within, of_kind, start, wait_for

WORDS = ("--engine-threads", "1", "--no-plots", "--num-rollout", "2")


def trained(example: str, run: Path, *words: str) -> dict[str, Any]:
    """The summary of `turnout train examples/EXAMPLE.yaml`, which ends well and leaves nothing."""
    given = ("train", str(ROOT / "examples" / f"{example}.yaml"), "--run-dir", str(run), *WORDS, *words)
    status, out, err = ended(start(*given))
    return whole(run, status, out + err)


def whole(run: Path, status: int, told: str) -> dict[str, Any]:
    assert status == 0, told
    assert gone_within(run, 5) == []
    summary = json.loads((run / "summary.json").read_text())
    assert summary["audit"]["failed"] == 0 and summary["groups"]["lost"] == 0, summary["audit"]
    return summary


def kl(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["train/reference_kl"] for row in rows if "train/reference_kl" in row]


def test_a_reward_model_and_a_reference_of_their_own(tmp_path: Path) -> None:
    """The log-probs by engines of the reference are the trainer's own before training: their KL is 0, which is the
    square of the difference; after it they are other ones. The KL is in the reward here, of another
    algorithm with a loss of its own."""
    run = tmp_path / "run"
    own = "--custom-loss-function-path examples/own_algorithm.py:reinforce"
    algorithm = f"--advantage-estimator reinforce_plus_plus --entropy-coef 0.001 {own}".split()
    rewarded = ("--kl-loss-coef", "0", "--kl-coef", "0.01", "--kl-loss-type", "k3")
    summary = trained("reward_model", run, "--dtype", "float32", *algorithm, *rewarded)
    models = summary["models"]
    assert set(models) == {"reward", "reference"}
    for told in (told for engines in models.values() for told in engines.values()):
        assert told["level"] == "memory" and told["attested"] == 2 and told["stayed"]
    base = next(row for row in of_kind(run, "VersionAttested"))
    assert [told["root"] for told in models["reference"].values()] == [base["root"]]
    assert all(-20 < reward < 0 for row in of_kind(run, "GroupCompleted") for reward in row["rewards"])
    before, after = kl(run)
    assert 0 <= before < 1e-8 and after > 1e-4


def test_a_tool_and_a_judge_that_are_models(tmp_path: Path) -> None:
    """The judge is killed in the middle: rewards wait for its next life, which holds what the first one held."""
    run = tmp_path / "run"
    words = ("--use-fault-tolerance", "--num-rollout", "6", "--rollout-health-check-interval", "0.3")
    process = start("train", str(ROOT / "examples/tools.yaml"), "--run-dir", str(run), *WORDS, *words)
    wait_for("a version of the run", lambda: of_kind(run, "VersionPublished"), process)
    judge = next(row for row in of_kind(run, "EngineReady") if row["engine"].startswith("reward"))
    assert not judge["updated"]
    os.kill(judge["pid"], signal.SIGKILL)
    status, out, err = ended(process)
    summary = whole(run, status, out + err)
    assert [row["engine"] for row in of_kind(run, "EngineLost")] == [judge["engine"]]
    assert f"engine {judge['engine']} serves the model 'reward' again" in out + err
    assert summary["models"]["reward"][judge["engine"]]["attested"] == 3
    assert summary["groups"]["dropped"] == 0, "no reward failed meanwhile"
    required = {name for row in of_kind(run, "VersionPublished") for name in row["required"]}
    assert required == {"actor.regular1-0"}
