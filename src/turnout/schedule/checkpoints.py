"""Checkpoints of a run: the trainer's whole state, the place in the data, the version; and the final HF export.

    <save>/step_000010/            trainer state, then state.json; the folder appears whole or not at all
    <save_hf>/                     the last version's weights as an ordinary Hugging Face checkpoint

Promises: a checkpoint is complete or absent; the two newest stay, older ones go only after a newer is complete;
what a killed save left behind goes with the next one; what another run left there is refused, never replaced.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from turnout.core.errors import ConfigError, Fault
from turnout.core.ports import Store
from turnout.core.rng import random_id
from turnout.core.version import WeightVersion
from turnout.schedule.parts import TrainerThread
from turnout.weights.checkpoint_io import copy_assets, write_checkpoint
from turnout.weights.tensors import HostTensor

KEPT = 2
_FOLDER = re.compile(r"step_(\d{6,})")
_LEFTOVER = re.compile(r"step_\d{6,}\.tmp-[0-9a-f]+|\.removed-step_\d{6,}.*")


@dataclass(frozen=True)
class SavePlan:
    """`folder` None saves nothing; `interval` None saves after the last step only. An HF export takes config and
    tokenizer from `assets`, and has files of at most `shard_bytes`."""

    folder: Path | None
    interval: int | None
    hf_folder: Path | None
    assets: Path
    shard_bytes: int


@dataclass(frozen=True)
class Place:
    """Where a run stands besides the trainer: the next ordinal of the source, and the current version."""

    position: int
    version: WeightVersion


class RunCheckpoints:
    """Checkpoints of the loop. `place` is asked when one is due."""

    def __init__(
        self, plan: SavePlan, files: Store, trainer: TrainerThread, place: Callable[[], Place]
    ) -> None:
        self._plan, self._files, self._trainer, self._place = plan, files, trainer, place
        self._saved: int | None = None

    async def save_if_due(self, steps_done: int, last: bool) -> None:
        plan = self._plan
        due = last or (plan.interval is not None and steps_done % plan.interval == 0)
        if due and plan.folder is not None and steps_done != self._saved:
            await self._save(plan.folder, steps_done)
            self._saved = steps_done
        target = plan.hf_folder
        if last and target is not None:
            _check_free("--save-hf", target)
            await self._trainer.call(
                "the weights to be exported", lambda backend: self._export(target, backend.export())
            )

    async def _save(self, folder: Path, steps_done: int) -> None:
        place = self._place()
        final = folder / f"step_{steps_done:06d}"
        _check_free("--save", final)
        folder.mkdir(parents=True, exist_ok=True)
        for name in self._files.names(folder):
            if _LEFTOVER.fullmatch(name):
                self._files.remove_tree(folder / name)
        staged = folder / f"{final.name}.tmp-{random_id()}"
        staged.mkdir()
        try:
            await self._trainer.call("the trainer to save", lambda backend: backend.save(staged))
            state = {
                "format": 1,
                "step": steps_done,
                "position": place.position,
                "version": asdict(place.version),
            }
            (staged / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
            await asyncio.to_thread(self._files.publish_folder, staged, final)
        finally:
            if staged.exists():
                self._files.remove_tree(staged)
        names = [name for name in self._files.names(folder) if _FOLDER.fullmatch(name)]
        for name in sorted(names, key=lambda n: int(n.split("_")[1]))[:-KEPT]:
            self._files.remove_tree(folder / name)

    def _export(self, target: Path, tensors: Iterable[HostTensor]) -> None:
        """From the trainer, so that it is there whatever way versions take to the engines."""
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = target.with_name(f".{target.name}.tmp-{random_id()}")
        try:
            staged.mkdir()
            copy_assets(self._plan.assets, staged)
            write_checkpoint(staged, tensors, self._plan.shard_bytes)
            self._files.publish_folder(staged, target)
        finally:
            if staged.exists():
                self._files.remove_tree(staged)


def check_folders(plan: SavePlan) -> None:
    """Before a run: raises ConfigError where --save holds another run's checkpoints or --save-hf anything."""
    if plan.folder is not None and plan.folder.is_dir():
        for path in plan.folder.iterdir():
            if _FOLDER.fullmatch(path.name):
                raise ConfigError(
                    Fault("--save", str(plan.folder), f"holds {path.name} already", "give another folder")
                )
    if plan.hf_folder is not None:
        _check_free("--save-hf", plan.hf_folder)


def _check_free(flag: str, target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(Fault(flag, str(target), "holds something already", "give another folder"))
