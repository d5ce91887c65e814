"""A batch that broke its step is kept whole; replayed alone it gives the bits that the step would have given."""

from __future__ import annotations

import asyncio
import errno
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train_models import batch_of, make_model, make_samples, settings_for
from tests.unit.train.test_critic import rewarded, with_critic
from turnout.config.load import dump, load
from turnout.config.rundir import make_run_dir
from turnout.core.errors import ConfigError, DataError, TrainError, TurnoutError, one_line
from turnout.observe.panel import Panel
from turnout.placement.real import DiskStore, RealClock
from turnout.schedule.incarnation import RunOutcome
from turnout.schedule.parts import TrainerThread
from turnout.schedule.saved_batches import (
    BATCH,
    REPLAY,
    STATE,
    SavedBatches,
    SavedPlan,
    replay_of,
    saved_paths,
)
from turnout.schedule.train_only import TrainOnly
from turnout.train.local import LocalBackend
from turnout.train.saved_batch import batch_bytes, read_batch
from turnout.weights.digest import root_of

BATCHES = [batch_of(make_samples(seed=20 + step), step) for step in range(3)]


class Full(DiskStore):
    """A full disk."""

    def publish_file(self, path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def publish_folder(self, staged: Path, final: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def config(tmp_path: Path) -> Any:
    (tmp_path / "train.jsonl").write_text('{"input": "a", "label": "b"}\n')
    file = tmp_path / "run.yaml"
    file.write_text(
        f"hf_checkpoint: {make_model(tmp_path / 'model')}\nprompt_data: {tmp_path / 'train.jsonl'}\n"
        f"rm_type: exact\nnum_rollout: 3\nsave: {tmp_path / 'save'}\nsave_interval: 1\n"
        f"save_debug_rollout_data: {tmp_path / 'saved'}/b_{{rollout_id}}.st\n"
    )
    return load(file)


def trained(
    config: Any, root: Path, backend: LocalBackend, batches: list[Any], files: Any = None
) -> list[Any]:
    async def run() -> list[Any]:
        trainer = TrainerThread(RealClock(), 60.0)
        trainer.hold(backend)
        saved = SavedBatches(trainer, SavedPlan(config, root, 3), files or DiskStore())
        try:
            return [await saved.train(batch) for batch in batches]
        finally:
            await trainer.close()

    return asyncio.run(run())


def broken_by(work: Any) -> TurnoutError:
    with pytest.raises(TurnoutError) as caught:
        work()
    return caught.value


def test_a_replay_of_a_broken_step_has_the_bits_of_that_step(tmp_path: Path, config: Any) -> None:
    settings = settings_for(Path(config.hf_checkpoint), deterministic=True)
    try:
        straight = LocalBackend(settings)
        last = [straight.train(batch) for batch in BATCHES][-1]
        breaks = LocalBackend(settings)
        whole, count = breaks._micro_step, iter(range(9))

        def micro_step(*words: Any) -> float:
            value = whole(*words)
            if next(count) == 2:
                raise RuntimeError("out of memory, say")
            return value

        breaks._micro_step = micro_step  # type: ignore[method-assign]
        fault = broken_by(lambda: trained(config, tmp_path / "run", breaks, BATCHES))
        assert isinstance(fault, TrainError) and isinstance(fault.__cause__, RuntimeError)
        folder = tmp_path / "run" / "broken" / "step_000002"
        told = one_line(fault)
        assert "step 2: the trainer failed: RuntimeError: out of memory, say" in told
        assert f"`turnout train {folder / REPLAY}` replays this step alone" in told
        assert read_batch(folder / BATCH).batch == BATCHES[2]
        replay = LocalBackend(settings)
        replay.load(folder / STATE)
        again = replay.train(read_batch(folder / BATCH).batch)
    finally:
        torch.use_deterministic_algorithms(False)
    assert root_of(replay.export()) == root_of(straight.export())
    assert torch.equal(replay._flat.master, straight._flat.master)
    assert torch.equal(replay._flat.exp_avg_sq, straight._flat.exp_avg_sq)
    assert (again.loss, again.grad_norm, again.lr) == (last.loss, last.grad_norm, last.lr)


def test_the_replays_configuration_starts_no_engine_and_writes_nowhere_that_the_run_writes(
    tmp_path: Path, config: Any
) -> None:
    bad = batch_of([replace(s, advantages=(math.nan,) * len(s.advantages)) for s in make_samples()], 4)
    backend = LocalBackend(settings_for(Path(config.hf_checkpoint), max_nonfinite_steps=1))
    fault = broken_by(lambda: trained(config, tmp_path, backend, [bad, bad]))
    folder = tmp_path / "broken" / "step_000004"
    replay = load(folder / REPLAY)
    assert replay.train_only and replay.load_debug_rollout_data == str(folder)
    assert replay.save is replay.save_hf is replay.save_debug_rollout_data is replay.save_interval is None
    assert saved_paths(str(folder), replay.num_rollout) == [folder / BATCH]
    again = LocalBackend(settings_for(Path(config.hf_checkpoint), max_nonfinite_steps=1))
    again.load(folder / STATE)
    with pytest.raises(TrainError) as caught:
        again.train(read_batch(folder / BATCH).batch)
    assert str(caught.value) == str(fault)


MANY = """
save_hf: {there}/hf
ledger_dir: {there}/ledger
run_dir: {there}/begun
resume: must
max_wall_time: 60
run_dir_max_gb: 1
use_fault_tolerance: true
engine_restarts: 3
min_engines: 1
num_gpus_per_node: 8
rollout_num_engines: 2
rollout_temperature: 0.9
custom_update_weight_post_write_path: a.b
check_weight_update_equal: true
eval_prompt_data: {there}/held.jsonl
eval_interval: 1
"""
WAYS = {
    "memory": "offload: true\ncolocate: true\nengine_linger: 60\nrouter: smg\n",
    "ray": "cluster: ray\nray_address: auto\nrollout_data_transport: object-store\nactor_num_gpus_per_node: 2\n",
    "async": "schedule: async\nmax_lead: 2\nmax_engine_lag: 1\non_weight_update: continue\nmask_kv_mixed: true\n"
    "async_save: true\noff_policy: tis\nupdate_weight_mode: delta\nengine_linger: 60\n",
    "store": "update_weight_disk_dir: s3://bucket/run\nengine_linger: 9\n",
    "critic": "advantage_estimator: ppo\nnum_critic_only_steps: 1\nuse_kl_loss: true\nkl_loss_coef: 0.1\n",
    "sglang": "engine: sglang\nupdate_weight_transport: group\n",
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_run_may_ask_a_replay_may(tmp_path: Path, config: Any, way: str) -> None:
    """The command that the error names runs, whatever else the run was told."""
    (tmp_path / "held.jsonl").write_text('{"input": "c", "label": "d"}\n')
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "run.json").write_text("{}")
    run = tmp_path / "many.yaml"
    run.write_text((tmp_path / "run.yaml").read_text() + MANY.format(there=tmp_path) + WAYS[way])
    asked = load(run)
    broken = tmp_path / "begun" / "broken" / "step_000001"
    broken.mkdir(parents=True)
    (broken / BATCH).write_bytes(b"")
    (broken / REPLAY).write_text(dump(replay_of(asked, broken)))
    replay = load(broken / REPLAY)
    assert replay.train_only and not replay.async_save and replay.run_dir is None
    assert replay.num_critic_only_steps == asked.num_critic_only_steps
    assert replay.actor_gpus == asked.actor_gpus


def test_each_batch_is_saved_with_its_step_in_the_name(tmp_path: Path, config: Any) -> None:
    trained(config, tmp_path, LocalBackend(settings_for(Path(config.hf_checkpoint))), BATCHES)
    paths = saved_paths(config.save_debug_rollout_data, None)
    assert [read_batch(path).batch for path in paths] == BATCHES
    assert saved_paths(config.save_debug_rollout_data, 2) == paths[:2]
    assert read_batch(paths[0]).about == {"steps": 3, "groups": []}


def test_a_full_disk_costs_the_debug_files_and_nothing_else(tmp_path: Path, config: Any, caplog: Any) -> None:
    backend = LocalBackend(settings_for(Path(config.hf_checkpoint)))
    assert len(trained(config, tmp_path / "run", backend, BATCHES, Full())) == 3
    assert caplog.text.count("No space left on device") == 3
    too_long = batch_of(make_samples(longest=30), 3)
    backend.settings = replace(backend.settings, max_tokens_per_micro_batch=12)
    fault = broken_by(lambda: trained(config, tmp_path / "run", backend, [too_long], Full()))
    assert isinstance(fault, ConfigError) and "--max-tokens-per-gpu" in str(fault)
    assert "its batch could not be kept: [Errno 28] No space left" in one_line(fault)
    assert list((tmp_path / "run" / "broken").iterdir()) == []


def test_a_state_in_the_middle_of_a_train_step_is_never_saved(tmp_path: Path, config: Any) -> None:
    """The first of two optimizer steps is applied, the second breaks: what is there belongs to neither."""
    samples = make_samples(groups=2, members=2)
    bad = batch_of(
        [*samples[:2], *(replace(s, advantages=(math.inf,) * len(s.advantages)) for s in samples[2:])]
    )
    settings = settings_for(Path(config.hf_checkpoint), samples_per_optimizer_step=2, max_nonfinite_steps=0)
    backend = LocalBackend(settings)
    fault = broken_by(lambda: trained(config, tmp_path, backend, [bad]))
    assert "kept without the trainer's state (the trainer stands in the middle of a train step)" in one_line(
        fault
    )
    folder = tmp_path / "broken" / "step_000000"
    assert sorted(path.name for path in folder.iterdir()) == [BATCH, REPLAY]
    with pytest.raises(TrainError, match="in the middle"):
        backend.save(tmp_path)
    assert json.loads((folder / REPLAY).read_text())["debug_train_only"]


def test_a_critic_that_stepped_before_the_step_broke_is_never_saved(tmp_path: Path, config: Any) -> None:
    samples = rewarded(make_samples(groups=2, members=2))
    bad = batch_of([*samples[:2], *(replace(s, reward=math.inf) for s in samples[2:])])
    how = with_critic(Path(config.hf_checkpoint), samples_per_optimizer_step=2, max_nonfinite_steps=0)
    fault = broken_by(lambda: trained(config, tmp_path, LocalBackend(how), [bad]))
    assert "the critic: 1 optimizer steps in a row" in str(fault)
    assert "without the trainer's state (the trainer stands in the middle" in one_line(fault)


def test_what_a_broken_step_had_skipped_is_not_counted_before_it(tmp_path: Path, config: Any) -> None:
    bad = batch_of([replace(s, advantages=(math.nan,) * len(s.advantages)) for s in make_samples(2, 3)])
    settings = settings_for(Path(config.hf_checkpoint), samples_per_optimizer_step=2, max_nonfinite_steps=1)
    fault = broken_by(lambda: trained(config, tmp_path, LocalBackend(settings), [bad]))
    again = LocalBackend(settings)
    again.load(tmp_path / "broken" / "step_000000" / STATE)
    assert again.counters.nonfinite_in_a_row == 0
    with pytest.raises(TrainError) as caught:
        again.train(bad)
    assert str(caught.value) == str(fault)


@pytest.mark.parametrize(
    ("asked", "flag", "whose"),
    [
        ({"use_kl_loss": True, "ref_model": "still"}, "--ref-model", "reference"),
        ({"use_opd": True, "opd_teacher": "wise"}, "--use-opd", "teacher"),
    ],
)
def test_batches_without_what_the_options_ask_of_them_are_refused_before_a_trainer_is_loaded(
    tmp_path: Path, config: Any, asked: dict[str, Any], flag: str, whose: str
) -> None:
    """Both batches have a sample that doesn't train, of which nothing is asked."""
    samples = make_samples()
    idle = replace(samples[0], loss_mask=(0,) * len(samples[0].loss_mask))
    told = [replace(s, **{whose: s.logprobs}) for s in samples[1:]]
    files = [tmp_path / "without.st", tmp_path / "with.st"]
    for file, those in zip(files, (samples[1:], told), strict=True):
        file.write_bytes(batch_bytes(batch_of([idle, *those]), {"steps": 1}))
    alone = {"save": None, "save_interval": None, "save_debug_rollout_data": None, "panel": "off"}
    without, whole = (
        config.model_copy(
            update=alone
            | asked
            | {"load_debug_rollout_data": str(file), "run_dir": str(file.with_suffix(""))}
        )
        for file in files
    )

    def train(config: Any) -> RunOutcome:
        only = TrainOnly(config, make_run_dir(config), RealClock(), DiskStore())
        return asyncio.run(only.run(Path(config.hf_checkpoint), Panel("off", RealClock())))

    with pytest.raises(DataError) as caught:
        train(without)
    (fault,) = caught.value.faults
    assert (fault.where, fault.value) == (flag, str(files[0])) and f"log-probs of a {whose}" in fault.reason
    assert train(whole).steps_done == 1
