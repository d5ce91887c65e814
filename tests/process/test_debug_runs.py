"""Halves of a run, as processes: rollouts without a trainer, training without engines, a broken step replayed."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.process.run_process import ended, of_kind, start, train
from turnout.cli.main import main
from turnout.observe.metrics import read_metrics
from turnout.train.saved_batch import read_batch

SHORT = ("--num-rollout", "2", "--no-plots", "--no-tensorboard", "--skip-eval-before-train")


def summary_of(run: Path) -> dict[str, object]:
    return json.loads((run / "summary.json").read_text())


def test_what_is_sampled_without_a_trainer_is_trained_without_an_engine(tmp_path: Path, capsys) -> None:
    sampled, trained, saved = tmp_path / "sampled", tmp_path / "trained", str(tmp_path / "b_{rollout_id}.st")
    status, _, err = train(sampled, *SHORT, "--debug-rollout-only", "--save-debug-rollout-data", saved)
    assert status == 0, err
    summary = summary_of(sampled)
    assert summary["status"] == "finished" and summary["steps"] == 2 and summary["audit"]["failed"] == 0
    assert (
        summary["groups"] | {"taken": 8, "dropped": 8, "trained": 0, "lost": 0, "open": 0}
        == summary["groups"]
    )
    assert main(["inspect", str(sampled), "--check"]) == 0
    assert capsys.readouterr().out == "8 groups, every history and every token in order\n"
    rows = [row for row in read_metrics(sampled / "metrics.jsonl") if "eval/score" not in row[1]]
    assert len(rows) == 2 and all("train/loss" not in row and row["weight_version"] == 0 for _, row in rows)
    rewards = [row["rollout/reward_mean"] for _, row in rows]
    assert {row["version"] for row in of_kind(sampled, "VersionCommitted")} == {
        read_batch(tmp_path / "b_1.st").batch.version
    }

    status, _, err = train(
        trained, *SHORT, "--load-debug-rollout-data", saved, "--save-hf", str(tmp_path / "hf")
    )
    assert status == 0, err
    assert not (trained / "engines").exists() and not (trained / "ledger.sqlite").exists()
    summary, rows = summary_of(trained), read_metrics(trained / "metrics.jsonl")
    assert summary["status"] == "finished" and summary["steps"] == 2
    assert [row["rollout/reward_mean"] for _, row in rows] == rewards
    assert all(row["optimizer_steps"] == 1 for _, row in rows)
    assert (tmp_path / "hf" / "model.safetensors").exists()
    status, _, err = train(trained, *SHORT, "--load-debug-rollout-data", saved)
    assert status == 2 and "--run-dir" in err


def test_a_batch_that_broke_its_step_is_kept_and_breaks_again_alone(tmp_path: Path) -> None:
    """Rewards beyond float32: the loss is not finite, and --max-nonfinite-steps 0 allows none."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def huge(prompt, response, label, **rest):\n    return len(response) * 1e200 + ord(response[0])\n"
    )
    run = tmp_path / "run"
    words = (
        "--custom-rm-path",
        f"{reward}:huge",
        "--no-grpo-std-normalization",
        "--max-nonfinite-steps",
        "0",
    )
    status, _, err = train(run, *SHORT, *words, "--save", str(tmp_path / "save"))
    assert status == 6 and "non-finite loss or gradient" in err, err
    command = re.search(r"`turnout (train \S+)` replays", err)
    assert command is not None, err
    broken = run / "broken" / "step_000000"
    assert read_batch(broken / "batch.safetensors").batch.step == 0
    assert sorted(path.name for path in (broken / "trainer").iterdir())
    assert [path.name for path in (run / "broken").iterdir()] == ["step_000000"]
    again = tmp_path / "again"
    status, _, told = ended(start(*command[1].split(), "--run-dir", str(again)))
    first = next(line for line in err.splitlines() if "non-finite" in line).partition("; its batch")[0]
    assert status == 6 and first in told, told
    assert not (again / "engines").exists() and summary_of(again)["status"] == "failed"
