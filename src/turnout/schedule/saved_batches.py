"""Batches as files: each one where --save-debug-rollout-data asks for it, and always one that broke its step.

    <run>/broken/step_000007/       batch.safetensors, trainer/ (its state before the step), replay.json

Promises: what stands there is whole or absent; the error of a broken step names the command that replays it alone,
from the trainer's state before the step; a batch that can't be written (the disk is full) is told and costs the
run nothing else.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnout.config.check_debug import STEP
from turnout.config.load import dump
from turnout.config.run_config import RunConfig, specs
from turnout.core.errors import DataError, Fault, TrainError, TurnoutError
from turnout.core.ports import Store
from turnout.core.rng import random_id
from turnout.core.types import RolloutGroup, TrainBatch
from turnout.schedule.colocated import Colocated
from turnout.schedule.loop import StepBatch
from turnout.schedule.parts import TrainerThread
from turnout.train.backend import TrainBackend
from turnout.train.saved_batch import SavedBatch, batch_bytes, read_batch

BATCH, STATE, REPLAY = "batch.safetensors", "trainer", "replay.json"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedPlan:
    """`root` is the run's directory; `steps` how many train steps the run has, where that is known."""

    config: RunConfig
    root: Path
    steps: int | None


class SavedBatches:
    """The trainer of the loop. `taken` is told of each batch before it is trained."""

    def __init__(self, trainer: TrainerThread | Colocated, plan: SavedPlan, files: Store) -> None:
        self._trainer, self._plan, self._files = trainer, plan, files
        self._groups: list[RolloutGroup] = []

    def taken(self, batch: StepBatch) -> None:
        self._groups = batch.groups

    async def train(self, batch: TrainBatch) -> dict[str, float]:
        """One step. Raises what broke it, with the way to replay it; what is no TurnoutError as TrainError."""
        about = {"steps": self._plan.steps, "groups": [_told(group) for group in self._groups]}
        pattern = self._plan.config.save_debug_rollout_data
        if pattern is not None:
            path = Path(pattern.replace(STEP, str(batch.step))).expanduser()
            await self._trainer.call("the batch to be saved", lambda _: self._save(path, batch, about))
        before = await self._trainer.call("the trainer's steps", lambda backend: backend.steps_done)
        try:
            return await self._trainer.train(batch)
        except Exception as fault:
            told = fault
            if not isinstance(fault, TurnoutError):
                told = TrainError(f"step {batch.step}: the trainer failed: {type(fault).__name__}: {fault}")
            told.add_note(await self._broken(batch, about, before))
            if told is fault:
                raise
            raise told from fault

    def _save(self, path: Path, batch: TrainBatch, about: dict[str, Any]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files.publish_file(path, batch_bytes(batch, about))
        except OSError as fault:
            log.warning("the batch of step %d is not saved to %s: %s", batch.step, path, fault)

    async def _broken(self, batch: TrainBatch, about: dict[str, Any], steps_done: int) -> str:
        """Keeps the batch, and tells how it is replayed."""
        final = self._plan.root / "broken" / f"step_{batch.step:06d}"
        staged = final.with_name(f".{final.name}.tmp-{random_id()[:8]}")
        try:
            (staged / STATE).mkdir(parents=True)
            (staged / BATCH).write_bytes(batch_bytes(batch, about))
            (staged / REPLAY).write_text(dump(replay_of(self._plan.config, final)), encoding="utf-8")
            without = await self._state(staged / STATE, steps_done)
            if final.exists():
                self._files.remove_tree(final)
            self._files.publish_folder(staged, final)
        except OSError as fault:
            return f"its batch could not be kept: {fault}"
        finally:
            if staged.exists():
                self._files.remove_tree(staged)
        return f"its batch is kept{without}; `turnout train {final / REPLAY}` replays this step alone"

    async def _state(self, folder: Path, steps_done: int) -> str:
        """Writes the trainer's state before the step into the folder, which goes where there is none; what to tell
        of that."""

        def save(backend: TrainBackend) -> str:
            if backend.steps_done != steps_done:
                return "the step was done"
            backend.save(folder)
            return ""

        try:
            why = await self._trainer.call("the trainer's state to be kept", save)
        except TurnoutError as fault:
            why = str(fault)
        if why:
            self._files.remove_tree(folder)
        return f" without the trainer's state ({why})" if why else ""


def replay_of(config: RunConfig, broken: Path) -> RunConfig:
    """The configuration that trains this batch alone, and writes nowhere that the run writes. What is refused
    without checkpoints, engines or a run to go on with is as by default."""
    places = ("save", "save_interval", "save_hf", "save_debug_rollout_data", "ledger_dir", "max_wall_time")
    refused = ("async_save", "resume", "cluster", "ray_address", "rollout_data_transport")
    refused += ("offload", "offload_train", "offload_rollout")
    change: dict[str, Any] = dict.fromkeys((*places, "update_weight_disk_dir"))
    change |= {name: specs()[name].default for name in refused}
    change |= {"load_debug_rollout_data": str(broken), "debug_train_only": True, "debug_rollout_only": False}
    return config.model_copy(update={**change, "run_name": f"replay-{broken.name}"})


def saved_paths(pattern: str, most: int | None) -> list[Path]:
    """The files to train on, in order: of steps from 0 as far as there are, or the one."""
    if STEP not in pattern:
        one = Path(pattern).expanduser()
        return [one / BATCH if one.is_dir() else one]
    found: list[Path] = []
    while most is None or len(found) < most:
        path = Path(pattern.replace(STEP, str(len(found)))).expanduser()
        if not path.exists():
            break
        found.append(path)
    return found


def saved_batch(path: Path, config: RunConfig) -> SavedBatch:
    """Raises DataError for one that can't be read, or lacks what the options ask of it."""
    saved = read_batch(path)
    asked = (
        ("--ref-model", "reference", config.ref_model is not None),
        ("--use-opd", "teacher", config.use_opd and config.opd_kl_coef > 0),
    )
    remedy = "leave the option out, or give batches of a run with it"
    trained = [sample for sample in saved.batch.samples if any(sample.loss_mask)]
    faults = [
        Fault(flag, str(path), f"its samples have no log-probs of a {whose}", remedy)
        for flag, whose, needed in asked
        if needed and any(len(getattr(s, whose)) < len(s.response_ids) for s in trained)
    ]
    if faults:
        raise DataError(faults)
    return saved


def _told(group: RolloutGroup) -> dict[str, Any]:
    """What a saved batch tells of a group besides its samples: also members without a token, which are none."""
    members = [
        {
            "tokens": len(t.response_ids),
            "reward": t.reward,
            "finish": t.finish,
            "versions": t.spans.runs,
            "engines": t.engines.runs,
        }
        for t in group.trajectories
    ]
    return {
        "group": group.group_id,
        "prompt": group.prompt.prompt_id,
        "attempt": group.attempt,
        "members": members,
    }
