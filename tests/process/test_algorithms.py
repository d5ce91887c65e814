"""Examples of ways to train, from prompts or data to the last version: what each of them should make better, gets
better, and the whole run stands its audit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.process.run_process import ROOT, ended, gone_within, of_kind, start

WORDS = ("--engine-threads", "1", "--trainer-threads", "1", "--no-plots")


def trained(example: str, run: Path, *words: str) -> list[dict[str, Any]]:
    """The metrics of the steps of `turnout train examples/EXAMPLE.yaml`, which ends well and leaves nothing."""
    given = ("train", str(ROOT / "examples" / f"{example}.yaml"), "--run-dir", str(run), *WORDS, *words)
    status, out, err = ended(start(*given))
    assert status == 0, out + err
    assert gone_within(run, 5) == []
    summary = json.loads((run / "summary.json").read_text())
    assert summary["audit"]["failed"] == 0 and summary["groups"]["lost"] == 0, summary["audit"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


def mean(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def test_ppo_with_a_critic(tmp_path: Path) -> None:
    rows = trained("ppo", tmp_path / "run")
    assert mean(rows[-3:], "rollout/reward_mean") > mean(rows[:3], "rollout/reward_mean") + 0.2
    assert rows[0]["train/rows"] == 0 and rows[1]["train/rows"] > 0
    assert rows[0]["train/value_mean"] == 0, "a new critic knows nothing"
    assert abs(rows[-1]["train/value_mean"] - rows[-1]["rollout/reward_mean"]) < 0.3


def test_distillation_from_a_teacher_without_a_reward(tmp_path: Path) -> None:
    run = tmp_path / "run"
    rows = trained("distill", run)
    assert mean(rows[-4:], "train/opd_kl") < 0.6 * rows[0]["train/opd_kl"]
    assert {row["rollout/reward_mean"] for row in rows} == {0}
    teachers = json.loads((run / "summary.json").read_text())["models"]["teacher"]
    assert all(engine["stayed"] for engine in teachers.values())


def test_fine_tuning_on_answers_of_a_file_without_engines(tmp_path: Path) -> None:
    run = tmp_path / "run"
    rows = trained("sft", run, "--save-hf", str(tmp_path / "hf"), "--update-weights-interval", "5")
    assert mean(rows[-3:], "train/loss") < 0.6 * rows[0]["train/loss"]
    assert {row["train/mismatch_mean_abs_logprob"] for row in rows} == {0}
    assert of_kind(run, "EngineReady") == [] and not list((run / "engines").glob("*"))
    assert (tmp_path / "hf" / "model.safetensors").is_file()
