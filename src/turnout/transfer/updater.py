"""One weight update from the trainer's export to attested engines, whatever way the bytes take.

Drives turnout.weights.update_machine over a `Transport`. Promises: a version becomes current (`current`) only
after all required engines attested its root digest from their live tensors; a failed update leaves `current` as
it was, fences every engine that was asked, and raises WeightError with the cause; no request is in flight at
activation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from turnout.core.errors import DeadlineExceeded, EngineError, WeightError
from turnout.core.events import VersionAborted, VersionAttested, VersionCommitted, VersionPublished
from turnout.core.ports import Clock, EventSink
from turnout.core.version import WeightVersion
from turnout.serving.client import Attestation, EngineClient
from turnout.transfer.attest import proved
from turnout.weights.stock_checksums import StockEngine, stock_checksums
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


@dataclass(frozen=True)
class Ready:
    """A version that exists for engines to take. `folder` is None where it lies on no disk; `encoding` is that of a
    delta, empty for a full version; `density` is the share of elements that it holds."""

    version: WeightVersion
    bytes: int
    folder: Path | None = None
    encoding: str = ""
    density: float = 1.0


class Transport(Protocol):
    """A way of versions to engines. `publish` and `prepare` change nothing that an engine serves; from `publish`
    to the end of `activate` the export stays the same, since no train step comes between. Faults of single
    engines are returned by engine id, not raised."""

    async def publish(self, export: Export, train_step: int, deadline_s: float) -> Ready:
        """Fixes the next version by its content; raises WeightError or DeadlineExceeded."""
        ...

    async def prepare(
        self, ready: Ready, export: Export, engines: Sequence[EngineClient], deadline_s: float
    ) -> dict[str, Exception | None]:
        """Does all that can be done while the engines serve their old weights. By engine id: None, or its
        WeightError, EngineError or DeadlineExceeded."""
        ...

    async def activate(
        self, ready: Ready, engines: Sequence[EngineClient], deadline_s: float
    ) -> dict[str, Attestation | Exception]:
        """Has prepared engines put the version into place: the only moment that pauses them. By engine id: what
        it attests, or why it holds unknown weights."""
        ...

    async def committed(self, version: WeightVersion) -> None:
        """Every required engine attested the version."""
        ...

    async def aborted(self, version: WeightVersion) -> None:
        """The version never becomes current: what engines were given of it and did not activate is taken back."""
        ...


class Updater:
    """Moves versions from the trainer to a fixed set of engines. One update at a time. `stock` says what kind of
    stock engines there are, None: none."""

    def __init__(
        self,
        transport: Transport,
        engines: Sequence[EngineClient],
        events: EventSink,
        clock: Clock,
        stock: StockEngine | None = None,
    ) -> None:
        self.transport, self.events, self.clock, self.stock = transport, events, clock, stock
        self.engines = {engine.engine_id: engine for engine in engines}
        self.current: WeightVersion | None = None
        self.fenced: set[str] = set()
        self.versions_committed = 0

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
        await self.transport.committed(version)


class Update:
    """One pass through the machine: `publish`, `prepare`, `commit`. Performs the machine's effects in order and
    feeds back what happened; all three raise WeightError with the first cause when the update is aborted."""

    def __init__(self, owner: Updater, export: Export, train_step: int, deadline_s: float) -> None:
        self._owner, self._export, self._train_step = owner, export, train_step
        self._clock = owner.clock
        self._end = self._clock.now() + deadline_s
        self._state = UpdateState()
        self._ready: Ready | None = None
        self._asked: list[str] = []
        self._expected: dict[str, str] | None = None

    async def publish(self) -> Ready:
        """Fixes the version. Nothing has changed for any engine when this returns."""
        self._feed(Begin(tuple(self._owner.engines)))
        self._feed(await self._publish())
        if self._ready is None:
            raise WeightError(f"weight update aborted: {self._state.reason}")
        return self._ready

    async def prepare(self) -> None:
        """Brings the version to every required engine, each of which serves on what it served."""
        assert self._ready is not None
        engines = [self._owner.engines[name] for name in self._asked]
        found = await self._owner.transport.prepare(self._ready, self._export, engines, self._left())
        for name, fault in found.items():
            if fault is not None:
                self._feed(Failed(name, str(fault)))
        await self._check(self._ready)

    async def commit(self) -> WeightVersion:
        """Has every required engine put the version into place and attest it; only then is it current."""
        assert self._ready is not None
        for event in await self._activate(self._ready):
            self._feed(event)
        await self._check(self._ready)
        await self._owner.committed(self._ready.version)
        return self._ready.version

    async def _check(self, ready: Ready) -> None:
        """Raises where the update was aborted."""
        if self._state.phase is Phase.ABORTED:
            await self._owner.transport.aborted(ready.version)
            raise WeightError(f"weight update aborted: {self._state.reason}")

    def _feed(self, event: Event) -> None:
        self._state, effects = step(self._state, event)
        for effect in effects:
            self._note(effect)

    def _note(self, effect: Effect) -> None:
        label = self._ready.version.label if self._ready else ""
        if isinstance(effect, Commit):
            self._owner.events.emit(VersionCommitted(label))
        elif isinstance(effect, Abort):
            self._owner.events.emit(VersionAborted(label, effect.reason))
        elif isinstance(effect, Fence):
            self._owner.fenced.add(effect.engine)
        elif isinstance(effect, Activate):
            self._asked.append(effect.engine)

    async def _publish(self) -> Event:
        try:
            self._ready = await self._owner.transport.publish(self._export, self._train_step, self._left())
            if self._owner.stock is not None:
                work = asyncio.to_thread(stock_checksums, self._export(), self._owner.stock)
                self._expected = await self._clock.within(self._left(), "the weights to be digested", work)
        except (WeightError, DeadlineExceeded) as fault:
            return Failed(None, str(fault))
        version = self._ready.version
        self._owner.events.emit(
            VersionPublished(
                version=version.label,
                incarnation=version.incarnation,
                counter=version.counter,
                root=version.root,
                step=self._train_step,
                bytes=self._ready.bytes,
                required=list(self._state.required),
            )
        )
        return Published(version.root)

    async def _activate(self, ready: Ready) -> list[Event]:
        engines = [self._owner.engines[name] for name in self._asked]
        busy = {}
        for engine in engines:
            fault = await _busy(engine)
            if fault is not None:
                busy[engine.engine_id] = fault
        if busy:  # before anything is sent: a group's broadcast reaches all engines or none
            return [Failed(name, str(fault)) for name, fault in busy.items()]
        found = await self._owner.transport.activate(ready, engines, self._left())
        root = ready.version.root
        return [self._outcome(engine, found[engine.engine_id], root) for engine in engines]

    def _outcome(self, engine: EngineClient, found: Attestation | Exception, root: str) -> Event:
        try:
            if isinstance(found, Exception):
                raise found
            found = proved(engine.engine_id, found, root, self._expected)
        except (EngineError, WeightError, DeadlineExceeded) as fault:
            return Failed(engine.engine_id, str(fault))
        engine.version = found.label
        self._owner.events.emit(VersionAttested(engine.engine_id, found.label, found.root, found.level))
        return Attested(engine.engine_id, found.root)

    def _left(self) -> float:
        return max(0.001, self._end - self._clock.now())


async def _busy(engine: EngineClient) -> Exception | None:
    """Why an engine cannot be updated now."""
    try:
        running = await engine.load()
    except EngineError as fault:
        return fault
    if running:
        return WeightError(
            f"engine {engine.engine_id} has {running} requests in flight; the update needs it idle"
        )
    return None
