"""Wrong functions for the guards of weights, versions and engines (turnout.sim.sabotage)."""

# ruff: noqa: ARG005 - a wrong function takes what the real one takes

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from turnout.core.events import VersionCommitted
from turnout.core.version import WeightVersion
from turnout.schedule import resume
from turnout.schedule.updates import Updates
from turnout.transfer import fleet
from turnout.transfer.fleet import Fleet
from turnout.transfer.update import Update
from turnout.transfer.updater import Updater
from turnout.weights import update_machine as machine
from turnout.weights.depot import FolderDepot
from turnout.weights.engine_machine import Engine
from turnout.weights.routing import Standing
from turnout.weights.store import WeightStore
from turnout.weights.update_machine import Abort, Attested, Commit, Phase

Wrong = Callable[[Any], Any]


@dataclass(frozen=True)
class Sabotage:
    """`owner` is a module or class, `attribute` what is replaced there, `wrong` makes it of the real one."""

    line: str
    owner: Any
    attribute: str
    wrong: Wrong


def _frees_at_publish(real: Any) -> Any:
    async def begin(self: Any, steps_done: int, must: bool) -> None:
        self._around.in_flight.committed(steps_done)
        await real(self, steps_done, must)

    return begin


def _moves_at_publish(real: Any) -> Any:
    async def publish(self: Any) -> Any:
        ready = await real(self)
        self._owner.events.emit(VersionCommitted(ready.version.label))
        return ready

    return publish


def _sends_before_persist(_real: Any) -> Any:
    """The record of a version is written with the next one."""

    def record(self: Any, root: str) -> WeightVersion:
        owed = getattr(self, "owed", None)
        if owed is not None:
            self._owner.publish(*owed)
        version = WeightVersion(self._owner.incarnation, self.newest_counter() + 1, root)
        self.owed = version, self._ids()
        return version

    return record


def _reads_nothing_back(_real: Any) -> Any:
    def create_once(self: Any, key: str, data: bytes) -> bool:
        try:
            return bool(self._files.create_once(self.root / key, data))
        except OSError:
            return False

    return create_once


def _first_attestation_commits(_real: Any) -> Any:
    def settled(state: Any) -> Any:
        if state.phase is Phase.ACTIVATING and state.those(Engine.TENTATIVE):
            return replace(state, phase=Phase.COMMITTED), (Commit(state.live),)
        return state, ()

    return settled


def any_root_will_do(real: Any) -> Any:
    """An engine that attests other weights has attested."""

    def outcome(self: Any, engine: Any, found: Any, version: Any) -> Any:
        event = real(self, engine, found, version)
        return Attested(engine.engine_id, version.root) if isinstance(event, Attested) else event

    return outcome


def tentative_engines_stay(real: Any) -> Any:
    """An aborted update fences nobody."""

    def aborted(state: Any, reason: str) -> Any:
        ended, _ = real(state, reason)
        return ended, (Abort(reason),)

    return aborted


def _admits_before_attestation(_real: Any) -> Any:
    async def join(self: Any, engine: Any, _deadline_s: float) -> bool:
        self.fleet.add(engine)
        if self.fleet.current is not None:
            engine.version = self.fleet.current.version.label
            self.fleet.hold(engine.engine_id, self.fleet.current)
        return True

    return join


def fence_is_forgotten(_real: Any) -> Any:
    """A fenced engine goes on as it was."""
    return lambda self, engine_id, label, reason: self._tentative.discard(engine_id)


def _incarnation_stays(real: Any) -> Any:
    return lambda incarnation=0, checkpoint=None: real(max(0, incarnation - 1), checkpoint)


def _however_old(real: Any) -> Any:
    return lambda engine, minimum, current, _most: real(engine, minimum, current, 1 << 30)


WEIGHT_SABOTAGES: dict[str, Sabotage] = {
    "free-slots-at-publish": Sabotage(
        "slots are freed when a version is published", Updates, "_begin", _frees_at_publish
    ),
    "version-moves-at-publish": Sabotage(
        "a version is current when it is published", Update, "publish", _moves_at_publish
    ),
    "send-before-persist": Sabotage(
        "engines get a version before its record is written", WeightStore, "record", _sends_before_persist
    ),
    "no-write-id-read-back": Sabotage(
        "a lost answer of the store is not settled by reading",
        FolderDepot,
        "create_once",
        _reads_nothing_back,
    ),
    "tentative-tokens-kept": Sabotage(
        "tokens of a version count before it is committed",
        Fleet,
        "standing",
        lambda _: lambda self, label, engine_id: Standing.COMMITTED,
    ),
    "admission-before-attestation": Sabotage(
        "an engine that starts again is asked at once", Updater, "join", _admits_before_attestation
    ),
    "resume-without-incarnation": Sabotage(
        "a resumed run keeps its incarnation", resume, "Beginning", _incarnation_stays
    ),
    "first-attestation-commits": Sabotage(
        "one engine's attestation commits a version", machine, "_settled", _first_attestation_commits
    ),
    "any-root-will-do": Sabotage(
        "an engine that attests other weights has attested", Update, "_outcome", any_root_will_do
    ),
    "tentative-engines-stay": Sabotage(
        "an aborted update fences nobody", machine, "_aborted", tentative_engines_stay
    ),
    "old-engine-routed": Sabotage(
        "an engine that is left out of updates is asked all the same", fleet, "routable", _however_old
    ),
    "fence-forgotten": Sabotage("a fenced engine goes on as it was", Fleet, "fence", fence_is_forgotten),
}
