"""Keeps a local checkpoint, and the engine beside it, at the newest version of a weight store. No torch.

look at the store -> route from what is held -> fetch, verify, journal, overwrite -> load into the engine -> attest

Promises: the store is the truth and only the newest version matters, so a late or lost look delays and never harms;
an engine is asked to load only what was verified in full, and counts as serving a version only once it has proved
it; what a fault leaves unknown is found out anew (`LocalCheckpoint.open`, a full load) before anything builds on
it. A version whose bytes are not what they should be is tried FETCHES_MAX times, then routes go around it. An
engine that answers LOADS_MAX loads wrongly, or does not prove the held version within `engine_deadline_s`, ends the
follower.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from turnout.core.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineBusy,
    EngineDead,
    EngineError,
    Fault,
    WeightError,
)
from turnout.core.ports import Clock
from turnout.core.version import WeightVersion
from turnout.transfer.followed_engine import FollowedEngine
from turnout.weights.catalog import FOLLOWERS, Catalog, StoreReader
from turnout.weights.chain import NoRoute, Route, cheapest
from turnout.weights.hooks import Hook
from turnout.weights.local_checkpoint import FETCH, VERIFY, LocalCheckpoint
from turnout.weights.manifest import FULL, WeightManifest
from turnout.weights.verify import file_checksum

LOAD, ATTEST = "engine load", "attest"
FETCHES_MAX, LOADS_MAX = 3, 3
HEARTBEAT_S = 60.0
NEWEST = -1


@dataclass(frozen=True)
class FollowPlan:
    """`until` is the counter of the version at which to end, NEWEST: the newest at the first look that finds one,
    None: never. `deadline_s` bounds that, None: not. Every `audit_interval` versions all digests of the local
    checkpoint are recomputed. `pre_read` is called with the local folder for a version's files before any is
    fetched: what it brings there, and is right, is not fetched."""

    follower_id: str
    poll_interval_s: float = 1.0
    engine_deadline_s: float = 600.0
    until: int | None = None
    deadline_s: float | None = None
    audit_interval: int = 20
    pre_read: Hook | None = None


@dataclass
class Phases:
    """Seconds by phase, from one `begin` to the next."""

    clock: Clock
    watch: Callable[[str], None] = lambda _: None
    spent: dict[str, float] = field(default_factory=dict)
    _now: str = ""
    _since: float = 0.0

    def begin(self, phase: str) -> None:
        """Ends the phase that runs and begins another; "" for none."""
        now = self.clock.now()
        if self._now:
            self.spent[self._now] = self.spent.get(self._now, 0.0) + now - self._since
        self._now, self._since = phase, now
        self.watch(phase)

    def taken(self) -> str:
        """What was spent, for people; begins to count anew."""
        self.begin("")
        text = ", ".join(f"{name} {seconds:.3f}" for name, seconds in self.spent.items())
        self.spent.clear()
        return text


@dataclass(frozen=True)
class Tools:
    """`say` takes one line for each version and each new fault."""

    clock: Clock
    phases: Phases
    say: Callable[[str], None]


class NotFetched(WeightError):
    """A file could not be had: gone, or the store does not answer. Says nothing about the version."""


class Follower:
    """See the module. Owns `local` while it runs."""

    def __init__(
        self,
        reader: StoreReader,
        local: LocalCheckpoint,
        engine: FollowedEngine | None,
        plan: FollowPlan,
        tools: Tools,
    ) -> None:
        self._reader, self.local, self._engine, self._plan = reader, local, engine, plan
        self._clock, self._phases, self._say = tools.clock, tools.phases, tools.say
        self._served: WeightVersion | None = None
        self._level = ""
        self._alone: WeightVersion | None = None  # told last, where no engine is followed
        self._refused: Counter[str] = Counter()
        self._wrong_loads = 0
        self._unproved_since: float | None = None
        self._read = self._applied = 0
        self._fault = ""
        self._lost: str | None = None
        self._told: tuple[WeightVersion | None, str, float] = (None, "", float("-inf"))
        self._until = plan.until
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Has `run` return after the step under way."""
        self._stop.set()

    async def run(self) -> None:
        """Follows until `until` is reached or `stop` is called. Raises DeadlineExceeded, an EngineError where the
        engine does not prove what is held, a WeightError where store and local checkpoint don't belong together."""
        begun = self._clock.now()
        while not self._stop.is_set():
            fault = await self.turn()
            if self._reached():
                return
            if self._plan.deadline_s is not None and self._clock.now() - begun > self._plan.deadline_s:
                what = "the version to be served" + (f" ({fault})" if fault else "")
                raise DeadlineExceeded(what, self._plan.deadline_s)
            with suppress(DeadlineExceeded):
                await self._clock.within(self._plan.poll_interval_s, "an end", self._stop.wait())

    async def turn(self) -> str:
        """One look at the store and what follows from it; returns what kept it from the newest version, or ""."""
        fault = ""
        try:
            await self._checkpoint()
        except (OSError, WeightError) as found:
            fault = str(found)
        if self._engine is not None and self.local.held is not None and not self._stop.is_set():
            fault = await self._serve(self._engine) or fault
        held = self.local.held
        if self._engine is None and held is not None and held != self._alone:
            self._say(f"{held.label}  read {self._read} bytes  {self._phases.taken()}")
            self._alone, self._read = held, 0
        if fault and fault != self._fault:
            self._say(f"{_label(self.local.held)} stays: {fault}")
        self._fault = fault
        await self._tell()
        return fault

    def _reached(self) -> bool:
        until, held = self._until, self.local.held
        done = self._engine is None or self._served == held
        return until not in (None, NEWEST) and held is not None and held.counter >= until and done

    async def _checkpoint(self) -> None:
        """Brings the local checkpoint to the newest version that has a folder."""
        if self.local.held is None:
            lost = await asyncio.to_thread(self.local.open)
            if lost and lost != self._lost:
                self._say(f"the local checkpoint counts no longer: {lost}")
            self._lost = lost
        catalog = await asyncio.to_thread(self._reader.look, False)
        self._check_run(catalog)
        if self.local.run_id is None and catalog.usable():  # before, nothing says what the folder may hold
            await asyncio.to_thread(self.local.adopt, catalog.identity.run_id, _roots(catalog))
        newest = max(catalog.usable(), key=lambda m: m.version.counter, default=None)
        if newest is not None and self._until == NEWEST:
            self._until = newest.version.counter
        while newest is not None and self.local.held != newest.version and not self._stop.is_set():
            await asyncio.to_thread(self._advance, catalog, newest)

    def _check_run(self, catalog: Catalog) -> None:
        mine, theirs = self.local.run_id, catalog.identity.run_id
        if mine is not None and mine != theirs:
            reason = f"belongs to run {mine}, the store to run {theirs}"
            fault = Fault("--local-checkpoint", str(self.local.folder), reason, "give another folder")
            raise ConfigError(fault)

    def _advance(self, catalog: Catalog, newest: WeightManifest) -> None:
        """One step of the cheapest route; a version that is wrong is counted."""
        held = self.local.held
        if held is not None and held.root == newest.version.root:
            self.local.rename(newest)
            return
        manifest = self._route(catalog, newest.version, held).steps[0]
        try:
            take = self.local.load if manifest.kind == FULL else self.local.apply
            take(manifest, self._fetch)
        except NotFetched:
            raise
        except WeightError:
            self._refused[manifest.write_id] += 1
            raise
        self._applied += 1
        if self._applied % self._plan.audit_interval == 0:
            self.local.audit()

    def _route(self, catalog: Catalog, target: WeightVersion, held: WeightVersion | None) -> Route:
        sound = [m for m in catalog.usable() if self._refused[m.write_id] < FETCHES_MAX]
        try:
            return cheapest(sound, target.root, held.root if held is not None else None)
        except NoRoute as fault:
            if held is not None:
                raise
            place = f"put the checkpoint that the run began with into {self.local.folder}"
            raise NoRoute(f"{fault}; {place}, or wait for a full version") from fault

    def _fetch(self, manifest: WeightManifest, folder: Path) -> None:
        """Brings a version's files into `folder`, where those that are there already still count."""
        self._phases.begin(FETCH)
        try:
            if self._plan.pre_read is not None:
                self._plan.pre_read(folder)
            for name, checksum in manifest.checksums.items():
                target = folder / name
                if not (target.is_file() and file_checksum(target) == checksum):
                    self._reader.depot.fetch_file(f"{manifest.directory}/{name}", target)
                    self._read += target.stat().st_size
        except WeightError as fault:
            raise NotFetched(str(fault)) from fault
        self._phases.begin(VERIFY)
        for name, checksum in manifest.checksums.items():
            if file_checksum(folder / name) != checksum:
                (folder / name).unlink()
                raise WeightError(f"{manifest.directory}/{name}: the bytes are not those that were written")

    async def _serve(self, engine: FollowedEngine) -> str:
        """Has the engine serve what is held; returns why it does not yet."""
        held = self.local.held
        assert held is not None
        try:
            label = await engine.label()
            if self._served == held and label == held.label:
                return ""
            await self._prove(engine, held, already=label == held.label and self._served is None)
        except (EngineError, WeightError, DeadlineExceeded) as fault:
            return await self._unproved(engine, fault)
        self._served, self._unproved_since, self._wrong_loads = held, None, 0
        self._say(f"{held.label}  read {self._read} bytes  {self._phases.taken()}  level {self._level}")
        self._read = 0
        return ""

    async def _prove(self, engine: FollowedEngine, held: WeightVersion, already: bool) -> None:
        """`already`: the engine names the version, so that it may hold it and need no load."""
        self._served = None
        left = self._left()
        if already:
            try:
                self._phases.begin(ATTEST)
                self._level = await engine.prove(held, self.local.tensors, left)
                return
            except WeightError as fault:
                self._say(f"{engine.name} names {held.label} and does not hold it: {fault}")
        self._phases.begin(LOAD)
        await engine.load(self.local.folder, held.label, left)
        self._phases.begin(ATTEST)
        self._level = await engine.prove(held, self.local.tensors, left)

    def _left(self) -> float:
        now = self._clock.now()
        since = self._unproved_since = now if self._unproved_since is None else self._unproved_since
        return max(1.0, since + self._plan.engine_deadline_s - now)

    async def _unproved(self, engine: FollowedEngine, fault: Exception) -> str:
        """The engine's weights are unknown; raises `fault` where that was so too often or for too long."""
        self._phases.begin("")
        self._served, left = None, self._left()
        if not isinstance(fault, EngineDead | EngineBusy):
            self._wrong_loads += 1
            await engine.disown()
        await self._tell()
        if self._wrong_loads >= LOADS_MAX or left <= 1.0:
            raise fault
        return str(fault)

    async def _tell(self) -> None:
        """Writes where this follower stands, when that has changed or is long ago."""
        held = self.local.held
        level = self._level if self._engine is not None and self._served == held else ""
        now = self._clock.now()
        if held is None or (self._told[:2] == (held, level) and now - self._told[2] < HEARTBEAT_S):
            return
        row = {
            "follower_id": self._plan.follower_id,
            "run_id": self.local.run_id,
            "incarnation": held.incarnation,
            "counter": held.counter,
            "root": held.root,
            "label": held.label,
            "level": level,  # of the engine's attestation; empty where it has proved nothing
            "time": self._clock.wall(),
        }
        key = f"{FOLLOWERS}/{self._plan.follower_id}.json"
        try:
            await asyncio.to_thread(self._reader.depot.put, key, json.dumps(row).encode())
        except WeightError as fault:
            self._say(f"the position could not be written: {fault}")
            return
        self._told = (held, level, now)


def _label(version: WeightVersion | None) -> str:
    return version.label if version is not None else "nothing"


def _roots(catalog: Catalog) -> dict[str, WeightVersion]:
    """Versions that a folder may hold already: those of the store, and what its deltas begin from."""
    bases = [m.base for m in catalog.usable() if m.base is not None]
    return {version.root: version for version in (*bases, *(m.version for m in catalog.usable()))}
