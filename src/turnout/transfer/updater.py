"""Moves weight versions from the trainer to the engines: adopts a base, begins updates, takes engines in.

Promises: one update at a time; `current` moves only by a commit; an engine that joins, or that an update fenced, is
routable only after it attested a committed version; what an engine proves counts, and what it only says does not,
unless that was asked for (`trust_label`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from turnout.core.errors import EngineRefused, InvariantBroken, WeightError
from turnout.core.events import VersionAttested, VersionCommitted
from turnout.core.ports import Clock, EventSink
from turnout.core.version import WeightVersion
from turnout.serving.client import Attestation, EngineClient
from turnout.serving.roster import Program
from turnout.transfer.attest import Expected, proved
from turnout.transfer.fleet import Fleet
from turnout.transfer.following import Following
from turnout.transfer.transport import Export, Ready, Transport
from turnout.transfer.update import FAULTS, Job, Update
from turnout.transfer.worker import Worker
from turnout.weights.routing import Held
from turnout.weights.stock_checksums import StockEngine, stock_checksums

__all__ = ["Export", "Ready", "Transport", "Update", "UpdatePolicy", "Updater"]


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UpdatePolicy:
    """`min_engines`: how many engines an update needs, None: all. `max_engine_lag`: how many train steps an engine
    may be behind and still be asked. `trust_label`: an engine that can only name its weights is believed.
    `drained`: an update is aborted where requests are in flight when it would be put into place. `follow`: versions
    come to the engines by followers, and an update waits for the proof of enough (turnout.transfer.following)."""

    min_engines: int | None = None
    max_engine_lag: int = 0
    trust_label: bool = False
    drained: bool = True
    follow: bool = False


class Updater:
    """See the module."""

    def __init__(
        self,
        transport: Transport,
        engines: Sequence[EngineClient],
        events: EventSink,
        clock: Clock,
        policy: UpdatePolicy | None = None,
    ) -> None:
        self.transport, self.events, self.clock = transport, events, clock
        self.policy = UpdatePolicy() if policy is None else policy
        self.fleet = Fleet(engines, events, self.policy.min_engines, self.policy.max_engine_lag)
        self.versions_committed = 0
        self._worker = Worker(clock)
        self._update: Update | None = None
        self._joins: dict[str, asyncio.Lock] = {}
        self._expected: Expected = {}  # of the current version
        self.fleet.follow = self.policy.follow
        self.following = Following(self) if self.policy.follow else None

    @property
    def current(self) -> WeightVersion | None:
        """The newest committed version."""
        return None if self.fleet.current is None else self.fleet.current.version

    async def adopt(
        self,
        base: WeightVersion,
        deadline_s: float,
        expected: Expected | None = None,
        train_step: int = 0,
        kept: Collection[str] = (),
    ) -> None:
        """Makes weights that the trainer holds the current version, after every engine has attested them: as it
        loaded them at its start or, where the transport keeps that version, after it loaded it now. Raises
        WeightError that names the engine otherwise. `expected` are the checksums of the trainer's weights where
        there are stock engines. Those that are `kept` hold weights of an earlier incarnation: nothing is asked of
        them, and none of them, before the update that must follow."""
        held = Held(base, train_step)
        fresh = {name: engine for name, engine in self.fleet.engines.items() if name not in kept}
        self._expected = {} if expected is None else expected
        lives = dict(self.fleet.lives)
        for engine in fresh.values():
            found = await self._caught_up(engine, held, deadline_s)
            if found.root != base.root:
                raise WeightError(
                    f"engine {engine.engine_id} loaded weights {found.root}, the trainer holds {base.root}: "
                    "both must load the same --hf-checkpoint with the same --dtype; an engine that holds what an "
                    "earlier run left there must be started again"
                )
        if lives != self.fleet.lives:
            raise WeightError("an engine ended while the base version was attested")
        if fresh or not self.fleet.engines:
            self.events.emit(VersionCommitted(base.label))
        self.fleet.current = held
        if self.following is not None:
            self.following.published(held, self._expected)
            self.following.committed(base)
        for name in fresh:
            self.fleet.hold(name, held)

    def begin(self, export: Export, train_step: int, deadline_s: float) -> Update:
        """A new update of all engines; `train_step` is the number of train steps done by now."""
        if self._update is not None and not self._update.ended.is_set():
            raise InvariantBroken("a weight update begins only after the last one has ended")
        self._update = Update(self, Job(export, train_step, deadline_s))
        return self._update

    async def join(self, engine: EngineClient, deadline_s: float) -> bool:
        """Takes in an engine that started, or started again. It waits for the end of an update under way, loads the
        current version and attests it; one that follows only says what it holds. Returns whether it may be asked;
        False: it takes part in the next update. Raises DeadlineExceeded where the update under way does not end."""
        end = self.clock.now() + deadline_s
        name = engine.engine_id
        while self.fleet.current is None:
            what = "the base version to be adopted"
            await self.clock.within(max(0.001, end - self.clock.now()), what, self.fleet.changed())
        self.fleet.add(engine)
        if self.following is not None:
            if self._update is not None:
                self._update.joined(name)
            await self.following.look(engine)
            return engine.holds is not None
        life = self.fleet.lives[name]
        await self._updates_ended(name, end)
        earlier = self._joins.setdefault(name, asyncio.Lock())
        what = f"an earlier try of engine {name} to join to end"
        await self.clock.within(max(0.001, end - self.clock.now()), what, earlier.acquire())
        try:
            await self._updates_ended(name, end)  # from here to `set_apart` nothing can begin
            self.fleet.set_apart(name, True)
            return await self._loaded(engine, life, end)
        finally:
            self.fleet.set_apart(name, False)
            earlier.release()

    async def _updates_ended(self, name: str, end: float) -> None:
        """Returns when no update is under way, for an engine to join: one that failed may be followed by the next
        before whoever waited for its end goes on."""
        while self._update is not None and not self._update.ended.is_set():
            self._update.joined(name)
            what = f"the update under way to end, for engine {name} to join"
            await self.clock.within(max(0.001, end - self.clock.now()), what, self._update.ended.wait())

    async def _loaded(self, engine: EngineClient, life: int, end: float) -> bool:
        """As `_joined`; an engine that fails is fenced."""
        try:
            return await self._joined(engine, life, end)
        except FAULTS as fault:
            if life == self.fleet.lives[engine.engine_id]:
                self.fleet.fence(engine.engine_id, "", str(fault))
            return False

    async def _joined(self, engine: EngineClient, life: int, end: float) -> bool:
        """Whether the engine, in the life in which it asked, holds the current version, loaded where need be."""
        while True:
            held = self.fleet.current
            if held is None:
                raise InvariantBroken("a base version is adopted before an engine joins")
            found = await self._caught_up(engine, held, max(0.001, end - self.clock.now()))
            if found.root != held.version.root or life != self.fleet.lives[engine.engine_id]:
                return False
            if held == self.fleet.current:  # else an update was committed meanwhile: once more
                self.fleet.hold(engine.engine_id, held)
                return True

    def lost(self, engine_id: str, reason: str) -> None:
        """An engine ended: it is fenced, and fails in an update under way."""
        if self._update is not None and not self._update.ended.is_set():
            self._update.lost(engine_id, reason)
        self.fleet.lost(engine_id, reason)

    async def leave(self, engine_id: str, reason: str, deadline_s: float) -> None:
        """The engine has no part any more: it is fenced, fails in an update under way, and is gone once that has
        ended. Raises DeadlineExceeded where it does not end."""
        if engine_id not in self.fleet.engines:
            return
        self.lost(engine_id, reason)
        if self._update is not None and not self._update.ended.is_set():
            what = f"the update under way to end, for engine {engine_id} to leave"
            await self.clock.within(deadline_s, what, self._update.ended.wait())
        self.fleet.remove(engine_id)
        self._joins.pop(engine_id, None)

    def published(self, held: Held, expected: Expected) -> None:
        """Called by an update: engines that follow may hold the version from here on."""
        if self.following is not None:
            self.following.published(held, expected)

    def aborted(self, version: WeightVersion) -> None:
        """Called by an update: the version never becomes current."""
        if self.following is not None:
            self.following.aborted(version)

    @property
    def publishing(self) -> bool:
        """Whether a version is about to be known."""
        return self._update is not None and self._update.publishing

    def awaits(self, engine_id: str, label: str) -> bool:
        """Whether the update under way waits for the engine's proof of this version."""
        return self._update is not None and self._update.awaits(engine_id, label)

    def attested(self, engine_id: str, root: str) -> None:
        """An engine that follows has proved the version of the update under way."""
        if self._update is not None:
            self._update.attested(engine_id, root)

    def committed(self, held: Held, engines: Sequence[str], expected: Expected) -> None:
        """Called by an update: from here on the version is current, and these engines hold it."""
        self.fleet.current, self._expected = held, expected
        if self.following is not None:
            self.following.committed(held.version)
        self.versions_committed += 1
        for name in engines:
            self.fleet.hold(name, held)

    async def checksums(self, export: Export, deadline_s: float) -> Expected:
        """What each kind of stock engine that there is must report of these weights."""
        what, end, made = "the weights to be digested as SGLang does", self.clock.now() + deadline_s, {}
        for stock in {engine.stock for engine in self.fleet.engines.values() if engine.stock is not None}:
            left = max(0.001, end - self.clock.now())
            made[stock] = await self._worker.run(what, partial(_digested, export, stock), left)
        return made

    def proved(
        self,
        engine: EngineClient,
        found: Attestation,
        version: WeightVersion,
        expected: Expected,
    ) -> Attestation:
        """See turnout.transfer.attest."""
        mine = None if engine.stock is None else expected.get(engine.stock)
        return proved(engine.engine_id, found, version, mine, self.policy.trust_label)

    async def _begun_anew(
        self, engine: EngineClient, version: WeightVersion, deadline_s: float
    ) -> Attestation | None:
        """An engine that somebody else started may hold what an earlier run left there: where the base version is
        wanted, it loads the checkpoint again that it was started with. None: it does not, or can't."""
        folder = engine.plan.model_path
        if engine.plan.program is not Program.EXTERNAL or version.counter or folder is None:
            return None
        log.info("engine %s is brought back to its checkpoint %s", engine.engine_id, folder)
        try:
            return await engine.update_from_disk(folder, version.label, deadline_s)
        except EngineRefused as fault:
            log.warning("%s", fault)
            return None

    async def _caught_up(self, engine: EngineClient, held: Held, deadline_s: float) -> Attestation:
        """What the engine attests after it loaded the version, if it did not hold it and the transport keeps it."""
        end = self.clock.now() + deadline_s
        version = held.version

        def left() -> float:
            return max(0.001, end - self.clock.now())

        found, unproved = await engine.attest(left()), None
        try:
            found = self.proved(engine, found, version, self._expected)
        except WeightError as fault:
            unproved = fault
        if unproved is not None or found.root != version.root:
            loaded = await self.transport.catch_up(version, engine, left())
            if loaded is not None:
                found = self.proved(engine, loaded, version, self._expected)
            else:
                loaded = await self._begun_anew(engine, version, left())
                if loaded is not None:
                    found = self.proved(engine, loaded, version, self._expected)
                elif unproved is not None:
                    raise unproved
        if found.root == version.root:
            await engine.set_version_label(version.label)
            engine.version = version.label
            self.events.emit(VersionAttested(engine.engine_id, version.label, found.root, found.level))
        return found


def _digested(export: Export, stock: StockEngine) -> dict[str, str]:
    return stock_checksums(export(), stock)
