"""Engines whose weights their own followers bring (turnout.transfer.follower), asked over and over what they hold.

Owns what of the run's versions such an engine may hold, and by what it proves them. Promises: an engine holds a
version once it has proved it and the version is committed, whenever and over whatever others it came there; an
update hears of each proof that it waits for; one that names weights which never became current, or can't prove what
it names, is fenced until it proves a committed version. One that is silent, late or busy is left to who watches its
health.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from turnout.core.errors import DeadlineExceeded, EngineBusy, EngineDead, EngineError, WeightError
from turnout.core.events import VersionAttested
from turnout.core.version import WeightVersion
from turnout.placement.tasks import first
from turnout.serving.client import Attestation, EngineClient
from turnout.transfer.attest import Expected
from turnout.weights.routing import Held

if TYPE_CHECKING:
    from turnout.transfer.updater import Updater

LOOK_S = 0.25  # from one look at an engine to the next
LABEL_DEADLINE_S, PROOF_DEADLINE_S = 10.0, 120.0
WRONG_PAUSE_S = 5.0  # before an engine is asked again for a proof that failed
VERSIONS_KEPT = 64
T = TypeVar("T")


class Following:
    """See the module."""

    def __init__(self, updater: Updater) -> None:
        self._updater, self._fleet, self._clock = updater, updater.fleet, updater.clock
        self._expected: dict[str, Expected] = {}  # by label, of each open version
        self._committed: set[str] = set()

    def published(self, held: Held, expected: Expected) -> None:
        """From now on engines may hold it; `expected` are the checksums of stock engines that do."""
        label = held.version.label
        self._fleet.open[label], self._expected[label] = held, expected
        for old in list(self._expected)[:-VERSIONS_KEPT]:
            self._forget(old)

    def committed(self, version: WeightVersion) -> None:
        self._committed.add(version.label)

    def aborted(self, version: WeightVersion) -> None:
        """It never becomes current: an engine that comes to hold it is fenced."""
        self._forget(version.label)

    async def beside(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` beside the looks, which a fault of theirs ends."""
        return await first(work, self.run())

    async def run(self) -> NoReturn:
        """Looks at every engine that is there until it is cancelled; one that answers late delays no other."""
        looks: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                for name, engine in self._fleet.present.items():
                    task = looks.get(name)
                    if task is not None and task.done():
                        task.result()
                    if task is None or task.done():
                        looks[name] = asyncio.ensure_future(self.look(engine))
                await self._clock.sleep(LOOK_S)
        finally:
            for task in looks.values():
                task.cancel()
            await asyncio.gather(*looks.values(), return_exceptions=True)

    async def look(self, engine: EngineClient) -> None:
        """Asks one engine what it holds, for a proof where that is news, and says so."""
        name = engine.engine_id
        life = self._fleet.lives[name]
        try:
            label = await engine.served_label(LABEL_DEADLINE_S)
            if life != self._fleet.lives[name] or not self._is_news(engine, label):
                return
            held = self._fleet.open[label]
            found = await engine.attest(PROOF_DEADLINE_S)
            if found.label == label:  # else it has gone on meanwhile
                found = self._updater.proved(engine, found, held.version, self._expected[label])
                self._proved(engine, life, held, found)
        except (EngineDead, EngineBusy, DeadlineExceeded):
            return
        except (EngineError, WeightError) as fault:
            if isinstance(fault.__cause__, DeadlineExceeded):
                return  # a client's call that came too late
            if life == self._fleet.lives[name]:
                self._fence(engine, str(fault))
            await self._clock.sleep(WRONG_PAUSE_S)

    def _is_news(self, engine: EngineClient, label: str) -> bool:
        """Whether a proof of what the engine names would change anything now."""
        if engine.holds is not None and engine.holds.version.label == label:
            return False
        if label not in self._fleet.open and self._updater.publishing:
            return False  # the store may show a version before the update does
        if label not in self._fleet.open:
            self._fence(engine, f"it names its weights {label}, which is no version of this run that counts")
            return False
        return label in self._committed or self._updater.awaits(engine.engine_id, label)

    def _proved(self, engine: EngineClient, life: int, held: Held, found: Attestation) -> None:
        name, label = engine.engine_id, held.version.label
        if life != self._fleet.lives[name] or self._fleet.open.get(label) is not held:
            return
        if found.root != held.version.root:
            raise WeightError(f"engine {name} names its weights {label}, and they digest to {found.root}")
        engine.version = label
        self._updater.events.emit(VersionAttested(name, label, found.root, found.level))
        if label in self._committed:
            self._fleet.hold(name, held)
        else:
            self._updater.attested(name, found.root)

    def _fence(self, engine: EngineClient, reason: str) -> None:
        if engine.holds is not None:
            self._fleet.fence(engine.engine_id, "", reason)

    def _forget(self, label: str) -> None:
        self._committed.discard(label)
        self._expected.pop(label, None)
        self._fleet.open.pop(label, None)
