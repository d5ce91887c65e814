"""Weight update through a shared directory: publish a full checkpoint, have every engine load and attest it.

Drives turnout.weights.update_machine. Promises: the version becomes current (`self.current`) only after all
required engines attested its root digest from their live tensors; a failed update leaves `current` as it was
and raises WeightError with the cause; no request is in flight at activation; retention keeps the two newest
committed versions, which all live engines have passed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from turnout.core.errors import DeadlineExceeded, EngineError, WeightError
from turnout.core.events import VersionAborted, VersionAttested, VersionCommitted, VersionPublished
from turnout.core.ports import Clock, EventSink
from turnout.core.version import WeightVersion
from turnout.serving.client import Attestation, EngineClient
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
    Publish,
    Published,
    UpdateState,
    step,
)

Export = Callable[[], Iterable[HostTensor]]
TRUSTED_LEVELS = ("memory", "checksum")
VERSIONS_KEPT = 2


@dataclass(frozen=True)
class UpdateReport:
    """One committed update: the version, its bytes on disk, seconds of each phase."""

    version: WeightVersion
    bytes: int
    publish_s: float
    activate_s: float


class DiskUpdater:
    """Moves versions from the trainer to a fixed set of engines. One update at a time."""

    def __init__(
        self, store: WeightStore, engines: Sequence[EngineClient], events: EventSink, clock: Clock
    ) -> None:
        self.store, self.events, self.clock = store, events, clock
        self.engines = {engine.engine_id: engine for engine in engines}
        self.current: WeightVersion | None = None
        self.fenced: set[str] = set()
        self.committed = 0
        self._kept: list[int] = []

    async def adopt(self, base: WeightVersion, deadline_s: float) -> None:
        """Makes the weights that every engine loaded at its start the current version, after each has
        attested that they are the trainer's own; raises WeightError that names the engine otherwise."""
        for engine in self.engines.values():
            found = await engine.attest(deadline_s)
            check_level(engine.engine_id, found)
            if found.root != base.root:
                raise WeightError(
                    f"engine {engine.engine_id} loaded weights {found.root}, the trainer holds {base.root}: "
                    "both must load the same --hf-checkpoint with the same --dtype"
                )
            await engine.set_version_label(base.label)
            engine.version = base.label
        self.current = base

    async def update(
        self, export: Export, train_step: int, deadline_s: float, keep_all: bool
    ) -> UpdateReport:
        """Publishes what `export` yields and commits it; `train_step` is the number of train steps done.
        Raises WeightError when the update was aborted, with the first cause."""
        report = await _Update(self, export, train_step, deadline_s).run(tuple(self.engines))
        self.current, self.committed = report.version, self.committed + 1
        self._kept.append(report.version.counter)
        if not keep_all:
            self._kept = self._kept[-VERSIONS_KEPT:]
            await asyncio.to_thread(self.store.prune, set(self._kept))
        return report


class _Update:
    """One pass through the machine: performs its effects in order, feeds back what happened."""

    def __init__(self, owner: DiskUpdater, export: Export, train_step: int, deadline_s: float) -> None:
        self._owner, self._export, self._train_step = owner, export, train_step
        self._clock = owner.clock
        self._end = self._clock.now() + deadline_s
        self._disk: OnDisk | None = None
        self._published_at = 0.0

    async def run(self, required: tuple[str, ...]) -> UpdateReport:
        """Ends with the version committed, or raises WeightError with the first cause."""
        started, state = self._clock.now(), UpdateState()
        pending: deque[Event] = deque([Begin(required)])
        while pending:
            state, effects = step(state, pending.popleft())
            for effect in effects:
                self._note(effect)
            if Publish() in effects:
                pending.append(await self._publish(required))
            engines = [effect.engine for effect in effects if isinstance(effect, Activate)]
            pending.extend(await asyncio.gather(*map(self._activate, engines)))
        if state.phase is not Phase.COMMITTED or self._disk is None:
            raise WeightError(f"weight update aborted: {state.reason}")
        at = self._published_at
        return UpdateReport(self._disk.version, self._disk.bytes, at - started, self._clock.now() - at)

    def _note(self, effect: Effect) -> None:
        label = self._disk.version.label if self._disk else ""
        if isinstance(effect, Commit):
            self._owner.events.emit(VersionCommitted(label))
        elif isinstance(effect, Abort):
            self._owner.events.emit(VersionAborted(label, effect.reason))
        elif isinstance(effect, Fence):
            self._owner.fenced.add(effect.engine)

    async def _publish(self, required: tuple[str, ...]) -> Event:
        try:
            work = asyncio.to_thread(self._owner.store.publish, self._export(), self._train_step)
            self._disk = await self._clock.within(self._left(), "the weights to be written", work)
        except (WeightError, DeadlineExceeded) as fault:
            return Failed(None, str(fault))
        self._published_at = self._clock.now()
        version = self._disk.version
        self._owner.events.emit(
            VersionPublished(
                version=version.label,
                incarnation=version.incarnation,
                counter=version.counter,
                root=version.root,
                step=self._train_step,
                bytes=self._disk.bytes,
                required=list(required),
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
            check_level(name, found)
        except (EngineError, WeightError) as fault:
            return Failed(name, str(fault))
        engine.version = found.label
        self._owner.events.emit(VersionAttested(name, found.label, found.root, found.level))
        return Attested(name, found.root)

    def _left(self) -> float:
        return max(0.001, self._end - self._clock.now())


def check_level(engine: str, found: Attestation) -> None:
    """Raises WeightError where an engine can only name its weights, not prove them."""
    if found.level not in TRUSTED_LEVELS:
        raise WeightError(
            f"engine {engine} can only name its weights (level {found.level!r}), not prove them"
        )
