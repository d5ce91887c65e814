"""Weight update through a shared directory: publish a full checkpoint, have every engine load and attest it.

Drives turnout.weights.update_machine. Promises: the version becomes current (`self.current`) only after all
required engines attested its root digest from their live tensors; a failed update leaves `current` as it was
and raises WeightError with the cause; no request is in flight at activation; retention keeps the two newest
committed versions, which all live engines have passed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from turnout.core.errors import DeadlineExceeded, EngineError, WeightError
from turnout.core.events import VersionAborted, VersionAttested, VersionCommitted, VersionPublished
from turnout.core.ports import Clock, EventSink
from turnout.core.version import WeightVersion
from turnout.serving.client import EngineClient
from turnout.transfer.attest import proved
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.stock_checksums import StockEngine, stock_checksums
from turnout.weights.store import Published as OnDisk
from turnout.weights.store import WeightStore
from turnout.weights.tensors import HostTensor
from turnout.weights.update_machine import (
    Abort,
    Activate,
    Attested,
    Begin,
    Commit,
    Effect,
    Event,
    Failed,
    Fence,
    Phase,
    Published,
    UpdateState,
    step,
)

Export = Callable[[], Iterable[HostTensor]]
VERSIONS_KEPT = 2


@dataclass(frozen=True)
class UpdateOptions:
    """`keep_all` switches retention off; `stock` says what kind of stock engines there are, None: none."""

    keep_all: bool = False
    stock: StockEngine | None = None


class DiskUpdater:
    """Moves versions from the trainer to a fixed set of engines. One update at a time."""

    def __init__(
        self,
        store: WeightStore,
        engines: Sequence[EngineClient],
        events: EventSink,
        clock: Clock,
        options: UpdateOptions | None = None,
    ) -> None:
        options = options if options is not None else UpdateOptions()
        self.store, self.events, self.clock = store, events, clock
        self.engines = {engine.engine_id: engine for engine in engines}
        self.current: WeightVersion | None = None
        self.fenced: set[str] = set()
        self.versions_committed = 0
        self.stock, self._keep_all = options.stock, options.keep_all
        self._kept: list[int] = []

    async def adopt(
        self, base: WeightVersion, deadline_s: float, expected: Mapping[str, str] | None = None
    ) -> None:
        """Makes the weights that every engine loaded at its start the current version, after each has
        attested that they are the trainer's own; raises WeightError that names the engine otherwise.
        `expected` are the checksums of the trainer's weights where there are stock engines."""
        for engine in self.engines.values():
            found = proved(engine.engine_id, await engine.attest(deadline_s), base.root, expected)
            if found.root != base.root:
                raise WeightError(
                    f"engine {engine.engine_id} loaded weights {found.root}, the trainer holds {base.root}: "
                    "both must load the same --hf-checkpoint with the same --dtype"
                )
            await engine.set_version_label(base.label)
            engine.version = base.label
            self.events.emit(VersionAttested(engine.engine_id, base.label, found.root, found.level))
        self.events.emit(VersionCommitted(base.label))
        self.current = base

    def begin(self, export: Export, train_step: int, deadline_s: float) -> Update:
        """A new update of all engines; `train_step` is the number of train steps done by now."""
        return Update(self, export, train_step, deadline_s)

    async def committed(self, version: WeightVersion) -> None:
        """Called by an update that every engine attested: from here on `version` is current."""
        self.current, self.versions_committed = version, self.versions_committed + 1
        self._kept.append(version.counter)
        if not self._keep_all:
            self._kept = self._kept[-VERSIONS_KEPT:]
            await asyncio.to_thread(self.store.prune, set(self._kept))


class Update:
    """One pass through the machine: `publish`, then `commit`. Performs the machine's effects in order and
    feeds back what happened; both raise WeightError with the first cause when the update is aborted."""

    def __init__(self, owner: DiskUpdater, export: Export, train_step: int, deadline_s: float) -> None:
        self._owner, self._export, self._train_step = owner, export, train_step
        self._clock = owner.clock
        self._end = self._clock.now() + deadline_s
        self._state = UpdateState()
        self._disk: OnDisk | None = None
        self._asked: list[str] = []
        self._expected: dict[str, str] | None = None

    async def publish(self) -> OnDisk:
        """Writes the version durably. Nothing has changed for any engine when this returns."""
        self._feed(Begin(tuple(self._owner.engines)))
        self._feed(await self._write())
        if self._disk is None:
            raise WeightError(f"weight update aborted: {self._state.reason}")
        return self._disk

    async def commit(self) -> WeightVersion:
        """Has every required engine load and attest the version; only then is it current."""
        assert self._disk is not None
        for event in await asyncio.gather(*map(self._activate, self._asked)):
            self._feed(event)
        if self._state.phase is not Phase.COMMITTED:
            raise WeightError(f"weight update aborted: {self._state.reason}")
        await self._owner.committed(self._disk.version)
        return self._disk.version

    def _feed(self, event: Event) -> None:
        self._state, effects = step(self._state, event)
        for effect in effects:
            self._note(effect)

    def _note(self, effect: Effect) -> None:
        label = self._disk.version.label if self._disk else ""
        if isinstance(effect, Commit):
            self._owner.events.emit(VersionCommitted(label))
        elif isinstance(effect, Abort):
            self._owner.events.emit(VersionAborted(label, effect.reason))
        elif isinstance(effect, Fence):
            self._owner.fenced.add(effect.engine)
        elif isinstance(effect, Activate):
            self._asked.append(effect.engine)

    async def _write(self) -> Event:
        try:
            work = asyncio.to_thread(self._owner.store.publish, self._export(), self._train_step)
            self._disk = await self._clock.within(self._left(), "the weights to be written", work)
            if self._owner.stock is not None:
                work = asyncio.to_thread(_expected, self._disk, self._owner.stock)
                self._expected = await self._clock.within(self._left(), "the weights to be digested", work)
        except (WeightError, DeadlineExceeded) as fault:
            return Failed(None, str(fault))
        version = self._disk.version
        self._owner.events.emit(
            VersionPublished(
                version=version.label,
                incarnation=version.incarnation,
                counter=version.counter,
                root=version.root,
                step=self._train_step,
                bytes=self._disk.bytes,
                required=list(self._state.required),
            )
        )
        return Published(version.root)

    async def _activate(self, name: str) -> Event:
        assert self._disk is not None
        engine = self._owner.engines[name]
        folder, label = str(self._disk.folder.resolve()), self._disk.version.label
        try:
            running = await engine.load()
            if running:
                raise WeightError(f"engine {name} has {running} requests in flight; the update needs it idle")
            found = await engine.update_from_disk(folder, label, self._left())
            found = proved(name, found, self._disk.version.root, self._expected)
        except (EngineError, WeightError) as fault:
            return Failed(name, str(fault))
        engine.version = found.label
        self._owner.events.emit(VersionAttested(name, found.label, found.root, found.level))
        return Attested(name, found.root)

    def _left(self) -> float:
        return max(0.001, self._end - self._clock.now())


def _expected(disk: OnDisk, stock: StockEngine) -> dict[str, str]:
    return stock_checksums(read_checkpoint(disk.folder), stock)
