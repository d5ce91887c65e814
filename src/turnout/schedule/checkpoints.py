"""Checkpoints of a run: the trainer's whole state, the ledger, where the run stands; and the final HF export.

    <save>/step_000010/            trainer state, ledger.sqlite, then state.json; the folder appears whole or not
    <save_hf>/                     the last version's weights as an ordinary Hugging Face checkpoint

Promises: a checkpoint is complete or absent; the two newest stay, older ones go only after a newer is complete;
what a killed save left behind goes with the next one; one that is written beside training holds what there was when
it was begun; what another run left there is refused, never replaced; an
incarnation that was taken over saves nothing more.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from turnout.config.run_config import RunConfig
from turnout.core.errors import ConfigError, DeadlineExceeded, Fault, InvariantBroken, TurnoutError
from turnout.core.ports import Store
from turnout.core.rng import random_id
from turnout.schedule.checkpoint_state import FOLDER, CheckpointState, read_state, step_of, write_state
from turnout.schedule.save_thread import SaveThread
from turnout.train.backend import Copying, TrainBackend
from turnout.weights.checkpoint_io import copy_assets, write_checkpoint
from turnout.weights.tensors import HostTensor

T = TypeVar("T")
Call = Callable[[str, Callable[[], None]], Awaitable[None]]
KEPT = 2
_LEFTOVER = re.compile(r"step_\d{6,}\.tmp-[0-9a-f]+|\.removed-step_\d{6,}.*")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavePlan:
    """`periodic`: after every `interval` steps (None: never between) and after the last one; otherwise only when a
    run is stopped before its end. An HF export takes config and tokenizer from `assets`, and has files of at most
    `shard_bytes`."""

    folder: Path
    periodic: bool
    interval: int | None
    hf_folder: Path | None
    assets: Path
    shard_bytes: int


class Calls(Protocol):
    """The trainer, as far as it is needed here."""

    async def call(self, what: str, work: Callable[[TrainBackend], T]) -> T: ...


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds besides the trainer. `state` after so many steps, None where the version of that step
    is not current. A copy of the ledger is written into the folder by `ledger` or, where the ledger can be read
    beside its writer, by `check`; that runs on another thread, syncs what else a resume reads, and raises where
    another incarnation has taken over, as `owned` does. `saved` is told of a complete one."""

    state: Callable[[int], CheckpointState | None]
    ledger: Callable[[Path], None]
    check: Callable[[Path], None]
    saved: Callable[[CheckpointState], None]
    owned: Callable[[], None] = lambda: None


class RunCheckpoints:
    """Checkpoints of the loop. `saved` is the step of the newest one. `beside`: where periodic ones are written
    beside training, at most one at a time, from a copy that is taken between two steps; the failure of one is
    raised by the next."""

    def __init__(
        self,
        plan: SavePlan,
        files: Store,
        trainer: Calls,
        contents: Contents,
        beside: SaveThread | None = None,
    ) -> None:
        self._plan, self._files, self._trainer, self._contents = plan, files, trainer, contents
        self._beside = beside
        self._under_way: asyncio.Task[None] | None = None
        self.saved: int | None = None

    def due(self, steps_done: int, last: bool) -> bool:
        """Whether `save_if_due` would write something."""
        plan = self._plan
        return (plan.periodic and self._interval_ends(steps_done, last)) or (
            last and plan.hf_folder is not None
        )

    def _interval_ends(self, steps_done: int, last: bool) -> bool:
        interval = self._plan.interval
        return last or (interval is not None and steps_done % interval == 0)

    async def save_if_due(self, steps_done: int, last: bool) -> None:
        plan = self._plan
        if plan.periodic and self._interval_ends(steps_done, last):
            await self.save(steps_done, beside=not last)
        if last:
            await export_hf(plan, self._files, self._trainer)

    async def settled(self) -> None:
        """No checkpoint is being written any more; raises what one beside training failed with."""
        if (task := self._under_way) is not None:
            try:
                await asyncio.shield(task)
            finally:
                if task.done():
                    self._under_way = None

    async def close(self) -> None:
        """The run ends: what is being written beside it is finished, or given up where the run is cut off; its
        failure is told, and no more."""
        closing = asyncio.current_task()
        try:
            if closing is None or not closing.cancelling():
                await self.settled()
        except (TurnoutError, OSError) as fault:
            log.warning("the last checkpoint is not written: %s", fault)
        finally:
            if (task := self._under_way) is not None:
                log.warning("the last checkpoint is not written: the run was cut off")
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            if self._beside is not None:
                self._beside.close()

    async def save(self, steps_done: int, beside: bool = False) -> None:
        """One now, where there is none of this step yet. No train step may run, and its version is committed. With
        `beside`, where that is asked for, it is complete later."""
        await self.settled()
        state = self._contents.state(steps_done)
        if steps_done == self.saved:
            return
        if state is None:
            log.warning("no checkpoint after %d steps: the version of that step is not current", steps_done)
            return
        folder = self._plan.folder
        final = folder / f"step_{steps_done:06d}"
        self._make_way(final)
        folder.mkdir(parents=True, exist_ok=True)
        left = [name for name in self._files.names(folder) if _LEFTOVER.fullmatch(name)]
        await self._remove(left, self._on_trainers)
        staged = folder / f"{final.name}.tmp-{random_id()}"
        staged.mkdir()
        if beside and self._beside is not None:
            await self._begin(self._beside, staged, state)
            return
        with self._written(staged):
            await self._trainer.call("the trainer to save", lambda backend: backend.save(staged))
            self._contents.ledger(staged)
            await self._trainer.call(
                "the checkpoint to be saved", lambda _: self._publish(staged, state, self._contents.check)
            )
        await self._complete(state, self._on_trainers)

    async def _begin(self, thread: SaveThread, staged: Path, state: CheckpointState) -> None:
        """Takes copies of all that the next steps change, and has them written beside those."""
        with self._written(staged):
            write = await self._trainer.call("a copy of the trainer's state", lambda b: _copying(b).copied())
            self._contents.ledger(staged)
            await self._trainer.call("the ledger to be copied", lambda _: self._contents.check(staged))

        async def work() -> None:
            with self._written(staged):
                await thread.call("the trainer's state to be written", lambda: write(staged))
                self._contents.owned()
                await thread.call(
                    "the checkpoint to be saved", lambda: self._publish(staged, state, lambda _: None)
                )
            await self._complete(state, thread.call)

        self._under_way = asyncio.ensure_future(work())

    @contextmanager
    def _written(self, staged: Path) -> Iterator[None]:
        """Removes what a save that failed has left. Where nobody waits for it any more, its thread may still write
        there: the next save removes that."""
        try:
            yield
        except (DeadlineExceeded, asyncio.CancelledError):
            raise
        except BaseException:
            if staged.exists():
                self._files.remove_tree(staged)
            raise

    async def _complete(self, state: CheckpointState, call: Call) -> None:
        """A checkpoint is there: it is told, and older ones go; where they are large that takes long."""
        self.saved = state.step
        self._contents.saved(state)
        names = [name for name in self._files.names(self._plan.folder) if FOLDER.fullmatch(name)]
        older = sorted(names, key=step_of)[:-KEPT]
        try:
            await self._remove(older, call)
        except (OSError, DeadlineExceeded) as fault:  # the next save tries again
            log.warning("older checkpoints could not be removed: %s", fault)

    async def _on_trainers(self, what: str, work: Callable[[], None]) -> None:
        """On the trainer's thread, which a save that is waited for has to itself."""
        await self._trainer.call(what, lambda _: work())

    async def _remove(self, names: Sequence[str], call: Call) -> None:
        def work() -> None:
            for name in names:
                self._files.remove_tree(self._plan.folder / name)

        if names:
            await call("older checkpoints to be removed", work)

    def _publish(self, staged: Path, state: CheckpointState, check: Callable[[Path], None]) -> None:
        write_state(staged, state)
        check(staged)
        self._files.publish_folder(staged, self._plan.folder / f"step_{state.step:06d}")

    def _make_way(self, final: Path) -> None:
        """A folder that a resume passed over is renamed: it is no checkpoint. A good one is never replaced."""
        if not final.exists():
            return
        try:
            owner = read_state(final).run_id
        except ValueError as fault:
            aside = final.with_name(f"{final.name}.broken-{random_id()[:8]}")
            final.rename(aside)
            log.warning("%s is no checkpoint (%s): renamed to %s", final, fault, aside.name)
            return
        raise ConfigError(Fault("--save", str(final), f"is of run {owner}", "give another folder"))


def _copying(backend: TrainBackend) -> Copying:
    if not isinstance(backend, Copying):
        raise InvariantBroken("--async-save is refused for this trainer")
    return backend


async def export_hf(plan: SavePlan, files: Store, trainer: Calls) -> None:
    """The HF export, where one is asked for: from the trainer, so that it is there whatever way versions take to
    the engines."""
    target = plan.hf_folder
    if target is None:
        return
    _check_free("--save-hf", target)

    def export(tensors: Iterable[HostTensor]) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = target.with_name(f".{target.name}.tmp-{random_id()}")
        try:
            staged.mkdir()
            copy_assets(plan.assets, staged)
            write_checkpoint(staged, tensors, plan.shard_bytes)
            files.publish_folder(staged, target)
        finally:
            if staged.exists():
                files.remove_tree(staged)

    await trainer.call("the weights to be exported", lambda backend: export(backend.export()))


def check_folders(config: RunConfig) -> None:
    """Before a new run: raises ConfigError where --save holds another run's checkpoints or --save-hf anything."""
    if config.save is not None and (save := Path(config.save)).is_dir():
        for path in save.iterdir():
            if FOLDER.fullmatch(path.name):
                raise ConfigError(
                    Fault("--save", str(save), f"holds {path.name} already", "give another folder")
                )
    if config.save_hf is not None:
        _check_free("--save-hf", Path(config.save_hf))


def _check_free(flag: str, target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(Fault(flag, str(target), "holds something already", "give another folder"))
