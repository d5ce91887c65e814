"""Whose directory it is, and when a command may go on with the run in it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from turnout.config import load
from turnout.config.rundir import RunPaths, make_run_dir
from turnout.core.errors import ConfigError
from turnout.placement.real import DiskStore
from turnout.rollout.prompts import Fingerprint
from turnout.schedule.run_record import RunRecord, open_record

DATA = Fingerprint(10, 2, "d" * 64, {"max_prompt_tokens": None})


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text("{}\n")
    return [
        "--hf-checkpoint", str(tmp_path / "model"), "--prompt-data", str(tmp_path / "data.jsonl"),
        "--rm-type", "exact", "--num-rollout", "4", "--run-dir", str(tmp_path / "run"),
    ]  # fmt: skip


def opened(words: list[str], *more: str, data: Fingerprint = DATA) -> tuple[RunPaths, RunRecord]:
    config = load(None, [*words, *more])
    paths = make_run_dir(config)
    return paths, open_record(paths, config, (data, None), DiskStore())


def test_the_run_id_stays_over_all_incarnations(words: list[str]) -> None:
    first = opened(words)
    again = opened(words, "--num-rollout", "5")
    assert not first[0].resumed and again[0].resumed
    assert first[1] == again[1]
    assert json.loads(again[0].config.read_text())["num_rollout"] == 5


def test_a_finished_run_is_refused_unless_its_end_moves(words: list[str]) -> None:
    paths, _ = opened(words)
    paths.summary.write_text(json.dumps({"status": "finished"}))
    with pytest.raises(ConfigError, match="holds a finished run"):
        opened(words)
    assert paths.summary.exists()
    opened(words, "--num-rollout", "5")
    assert not paths.summary.exists(), "it tells of the end before"
    opened(words, "--num-rollout", "5")  # as after a kill: what was extended has no end yet


@pytest.mark.parametrize("status", ["failed", "interrupted", "paused"])
def test_a_run_that_ended_early_goes_on(words: list[str], status: str) -> None:
    paths, record = opened(words)
    paths.summary.write_text(json.dumps({"status": status}))
    assert opened(words)[1] == record


def test_ckp_02_another_configuration_is_refused_and_changes_nothing(words: list[str]) -> None:
    paths, _ = opened(words)
    before = {path.name: path.read_bytes() for path in paths.root.iterdir()}
    with pytest.raises(ConfigError, match=r"(?s)2 faults.*--lr = 0\.1.*--seed = 7"):
        opened(words, "--seed", "7", "--lr", "0.1")
    assert {path.name: path.read_bytes() for path in paths.root.iterdir()} == before


def test_a_frozen_model_stays_what_it_was_and_engines_may_change(words: list[str], tmp_path: Path) -> None:
    def with_reward(name: str, path: str, engines: int) -> list[str]:
        group = f"server_groups: [{{worker_type: regular, num_gpus: {engines}}}]"
        models = f"sglang: [{{name: actor, {group}}}, {{name: reward, model_path: {path}, {group}}}]\n"
        (tmp_path / name).write_text(models)
        return [*words, "--sglang-config", str(tmp_path / name)]

    opened(with_reward("one.yaml", "org/judge", 1))
    opened(with_reward("two.yaml", "org/judge", 2))
    for other, given in ((with_reward("three.yaml", "org/other", 1), "org/other"), (words, "without it")):
        with pytest.raises(ConfigError, match=f"--sglang-config = {given}: the model reward .* is org/judge"):
            opened(other)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (replace(DATA, rows=3, size=14), "there were 2 prompts, now 3"),
        (replace(DATA, digest="e" * 64), "another order"),
        (replace(DATA, settings={"max_prompt_tokens": 5}), "max_prompt_tokens: None then, 5 now"),
    ],
)
def test_ckp_11_changed_data_is_refused_with_what_changed(
    words: list[str], data: Fingerprint, told: str
) -> None:
    opened(words)
    with pytest.raises(ConfigError, match=rf"--prompt-data: .*{told}"):
        opened(words, data=data)


def test_two_runs_that_begin_in_one_folder_at_once(words: list[str]) -> None:
    paths, _ = opened(words)
    config = load(None, words)
    with pytest.raises(ConfigError, match="another run has just begun"):
        open_record(replace(paths, resumed=False), config, (DATA, None), DiskStore())


def test_a_record_that_is_none_is_told(words: list[str]) -> None:
    paths, _ = opened(words)
    paths.record.write_text('{"format": 9}')
    with pytest.raises(ConfigError, match="is not the record of a run"):
        opened(words)
