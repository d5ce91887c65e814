"""Seeded worlds for weight updates: the real Updater, engines and a trainer that fail at random, a virtual clock.

A world is one run: updates with engines that refuse, are slow, lose requests or answers, do what they are told
twice, load something else, die and start again, and a trainer that is killed and started again. Time is virtual: a
wait costs nothing, and a wait without an end is an error at once. `run_world(seed)` raises Broken with the seed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from turnout.core.errors import EngineBusy, EngineDead, EngineError, TurnoutError, WeightError
from turnout.core.events import EngineReady, VersionCommitted
from turnout.core.version import WeightVersion
from turnout.observe.audit_versions import (
    commits_are_attested,
    counters_only_rise,
    engines_activate_what_they_prepared,
    tentative_engines_are_fenced,
    versions_end_once,
)
from turnout.serving.address import Address
from turnout.serving.client import Attestation, EngineClient
from turnout.sim.loop import Stuck, VirtualClock, VirtualLoop
from turnout.transfer.fleet import TRIES_MAX
from turnout.transfer.outcomes import outcomes
from turnout.transfer.transport import Ready
from turnout.transfer.updater import UpdatePolicy, Updater

DEADLINE_S = 10.0
NEVER_S = 1e6
WORLD_S = 1e5
RULES = (
    commits_are_attested,
    counters_only_rise,
    engines_activate_what_they_prepared,
    tentative_engines_are_fenced,
    versions_end_once,
)
FAULTS = ("refused", "request lost", "answer lost", "slow", "twice", "other weights", "dies", "dies after")


class Broken(Exception):
    """A promise does not hold; the text begins with the seed."""


def root_of_step(step: int, attempt: int = 0) -> str:
    return f"{step:016x}{attempt:016x}"


class SimEngine(EngineClient):
    """An engine in memory. A call travels, then the engine works on it whether or not the caller still waits; one
    call that changes weights at a time. `process` counts its starts."""

    def __init__(self, name: str, world: World) -> None:
        super().__init__(name, Address("127.0.0.1", 1), world.clock)
        self.world = world
        self.alive, self.process = True, 0
        self.root, self.label = world.base.root, "default"
        self.staged: tuple[str, str] | None = None
        self.working = False

    def die(self) -> None:
        if not self.alive:
            return
        self.alive, self.staged, self.working = False, None, False
        self.process += 1
        self.root, self.label = self.world.base.root, "default"
        self.world.died(self)

    def dead(self) -> EngineDead:
        return EngineDead(self.engine_id, "update", self.version, "connection refused")

    async def call(self, effect: Callable[[bool], Any], changes: bool, deadline_s: float) -> Any:
        """`effect(other)` does the work, with other weights than asked for where `other`."""
        what = f"engine {self.engine_id}"
        return await self.clock.within(deadline_s, what, self._travel(effect, changes))

    @property
    def clock(self) -> VirtualClock:
        return self.world.clock

    async def _travel(self, effect: Callable[[bool], Any], changes: bool) -> Any:
        fault = self.world.fault()
        await self.clock.sleep(self.world.rng.uniform(0, 0.2))
        if fault == "request lost":
            await self.clock.sleep(NEVER_S)
        if not self.alive:
            raise self.dead()
        if fault == "dies":
            self.die()
            raise self.dead()
        if fault == "refused":
            raise EngineError(self.engine_id, "update", self.version, "answered 500")
        if changes and self.working:
            raise EngineBusy(self.engine_id, "update", self.version, "an update is under way")
        work = asyncio.ensure_future(self._work(effect, changes, fault))
        self.world.tasks.add(work)
        found = await asyncio.shield(work)
        if fault == "answer lost":
            await self.clock.sleep(NEVER_S)
        if fault == "dies after":
            self.die()
            raise self.dead()
        await self.clock.sleep(
            self.world.rng.uniform(0, 0.5)
        )  # it arrives even from one that is gone by then
        if isinstance(found, Exception):
            raise found
        return found

    async def _work(self, effect: Callable[[bool], Any], changes: bool, fault: str) -> Any:
        process = self.process
        if changes:
            self.working = True
        slow = fault == "slow"
        await self.clock.sleep(self.world.rng.uniform(0, 2 * DEADLINE_S if slow else 1.0))
        if process != self.process:
            return self.dead()
        if changes:
            self.working = False
        try:
            found = effect(fault == "other weights")
            if fault == "twice":
                found = effect(False)
        except EngineError as refusal:
            return refusal
        return found

    async def attest(self, deadline_s: float) -> Attestation:
        return await self.call(lambda _: Attestation(self.label, self.root, "memory"), False, deadline_s)

    async def load(self) -> int:
        return await self.call(lambda _: 0, False, DEADLINE_S)

    async def set_version_label(self, label: str) -> None:
        def rename(_: bool) -> None:
            if label.split("-")[1] != self.root[:16]:
                raise EngineError(self.engine_id, "update", self.version, f"{label} names other weights")
            self.label = label

        await self.call(rename, True, DEADLINE_S)

    async def stage(self, version: WeightVersion, deadline_s: float) -> str:
        def keep(other: bool) -> str:
            name = f"{self.process}-{self.world.rng.random()}"
            self.staged = name, "f" * 32 if other else version.root
            return name

        return await self.call(keep, True, deadline_s)

    async def put(self, name: str, label: str, deadline_s: float) -> None:
        def swap(_: bool) -> None:
            if self.staged is None or self.staged[0] != name:
                raise EngineError(self.engine_id, "update", self.version, "no such set is prepared")
            self.root, self.label = self.staged[1], label

        await self.call(swap, True, deadline_s)

    async def take(self, version: WeightVersion, deadline_s: float) -> None:
        def load(other: bool) -> None:
            self.root, self.label = "f" * 32 if other else version.root, version.label

        await self.clock.sleep(self.world.rng.uniform(0, DEADLINE_S))  # another update may pass meanwhile
        await self.call(load, True, deadline_s)


class SimTransport:
    """A Transport over SimEngines. Every version ever published is kept, as in a store."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._sets: dict[str, str] = {}

    async def publish(self, export: Any, train_step: int, deadline_s: float) -> Ready:
        world = self.world
        if world.fault() == "refused":
            raise WeightError("no space left on the device")
        await world.clock.within(deadline_s, "writing", world.clock.sleep(world.rng.uniform(0, 1)))
        world.counter += 1
        return Ready(WeightVersion(world.incarnation, world.counter, export()), 1)

    async def prepare(self, ready: Ready, export: Any, engines: Any, deadline_s: float) -> Any:
        self._sets = {}

        async def stage(engine: SimEngine) -> None:
            self._sets[engine.engine_id] = await engine.stage(ready.version, deadline_s)

        return await outcomes(engines, stage)  # type: ignore[arg-type]

    async def activate(self, ready: Ready, engines: Any, deadline_s: float) -> Any:
        async def put(engine: SimEngine) -> Attestation:
            await engine.put(self._sets[engine.engine_id], ready.version.label, deadline_s)
            return await engine.attest(deadline_s)

        return await outcomes(engines, put)  # type: ignore[arg-type]

    async def committed(self, version: WeightVersion) -> None: ...

    async def aborted(self, version: WeightVersion) -> None: ...

    async def close(self) -> None: ...

    async def catch_up(self, version: WeightVersion, engine: Any, deadline_s: float) -> Attestation:
        await engine.take(version, deadline_s)
        return await engine.attest(deadline_s)


@dataclass
class World:
    """One run. `rate` is the share of calls with a fault."""

    seed: int
    loop: VirtualLoop
    rng: random.Random = field(init=False)
    rate: float = 0.0
    counter: int = 0
    incarnation: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    logs: list[list[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.clock = VirtualClock(self.loop)
        self.base = WeightVersion(0, 0, root_of_step(0))
        self.tasks: set[asyncio.Future[Any]] = set()
        self.joining: set[asyncio.Future[Any]] = set()
        self.engines = [SimEngine(f"e{n}", self) for n in range(self.rng.randint(1, 4))]
        self.min_engines = self.rng.randint(1, len(self.engines))
        self.saved = (self.base, 0)  # what a trainer that starts again begins with
        self.step = 0

    def emit(self, event: Any) -> None:
        self.logs[-1].append(event)
        if isinstance(event, VersionCommitted) and not event.version.startswith("v000000"):
            self.counts["committed"] += 1

    def fault(self) -> str:
        if self.rng.random() >= self.rate:
            return ""
        found = self.rng.choice(FAULTS)
        self.counts[found] += 1
        return found

    def died(self, engine: SimEngine) -> None:
        """The monitor sees it at once; the engine starts again later and joins."""
        self.counts[f"engine killed while {self.phase()}"] += 1
        if engine.engine_id in self.updater.fleet.engines:
            self.updater.lost(engine.engine_id, "killed")
        self.tasks.add(asyncio.ensure_future(self._restart(engine)))

    def phase(self) -> str:
        """Where the newest update of this trainer is."""
        update = self.updater._update
        return "idle" if update is None else str(update._state.phase)

    async def _restart(self, engine: SimEngine) -> None:
        await self.clock.sleep(self.rng.uniform(0.1, 2 * DEADLINE_S))
        engine.alive = True
        if self.updater.current is not None:
            self.joining.add(asyncio.ensure_future(self.joins(self.updater, engine)))

    async def joins(self, updater: Updater, engine: SimEngine) -> bool:
        try:
            joined = await updater.join(engine, 3 * DEADLINE_S)
        except TurnoutError:
            return False
        self.counts["joined"] += joined
        return joined

    def start(self) -> None:
        """A new trainer; what the old one had begun ends with it, what engines do for it goes on."""
        for task in self.joining:
            task.cancel()
        self.joining.clear()
        self.logs.append([EngineReady(engine.engine_id, "sim", None, "none") for engine in self.engines])
        policy = UpdatePolicy(min_engines=self.min_engines)
        self.updater = Updater(SimTransport(self), self.engines, self, self.clock, policy)
        for engine in self.engines:
            engine.holds = None

    async def adopt(self) -> bool:
        self.start()
        version, self.step = self.saved
        try:
            await self.updater.adopt(version, DEADLINE_S, train_step=self.step)
        except TurnoutError:
            return False
        return True

    async def train(self, updates: int) -> None:
        """So many updates, whether they are committed or aborted."""
        for attempt in range(1, updates + 1):
            self.step += 1
            root = root_of_step(self.step, attempt + (self.incarnation << 8))
            update = self.updater.begin(lambda root=root: root, self.step, DEADLINE_S)  # type: ignore[misc]
            try:
                await update.publish()
                await update.prepare()
                version = await update.commit()
            except WeightError:
                self.counts["aborted"] += 1
            else:
                self.check(version)
                if self.rng.random() < 0.5:
                    self.saved = version, self.step
            self.routed()
            await self.clock.sleep(self.rng.uniform(0, 5))

    def check(self, version: WeightVersion) -> None:
        assert self.updater.current == version
        holding = [e for e in self.engines if e.holds is not None and e.holds.version == version]
        if len(holding) < self.min_engines and all(e.alive for e in self.engines):
            raise Broken(f"{version.label} was committed by {len(holding)}, {self.min_engines} are needed")

    def routed(self) -> None:
        """No request may go to an engine that does not hold what it is said to hold."""
        if self.updater.current is None:
            return
        try:
            engines = self.updater.fleet.routable()
        except WeightError:
            return
        for engine in engines:
            assert isinstance(engine, SimEngine)
            if not engine.alive or engine.root != self.updater.current.root:
                said = self.updater.current.label
                raise Broken(f"{engine.engine_id} is routable with {engine.root}, current is {said}")

    async def watch(self) -> None:
        while True:
            await self.clock.sleep(0.5)
            if self.rng.random() < self.rate / 10:
                apart = [e for e in self.engines if e.engine_id in self.updater.fleet._apart]
                self.rng.choice(apart or self.engines).die()
            self.routed()

    async def _until(self, work: Any, seconds: float) -> None:
        """Runs `work` beside the watch for so long, then kills it; what it breaks is raised."""
        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(self.watch())]
        try:
            done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def live(self) -> None:
        rate = self.rng.choice((0.02, 0.1, 0.2, 0.3))
        for _ in range(self.rng.randint(1, 4)):
            self.rate = rate if self.rng.random() < 0.3 else 0.0
            started = await self.adopt()
            self.rate = rate
            if started:
                await self._until(self.train(20), self.rng.uniform(5, 40))
                self.counts[f"trainer killed while {self.phase()}"] += 1
            self.incarnation += 1
        self.rate = 0.0
        if not await self.adopt():
            await self.clock.sleep(NEVER_S / 100)  # until whatever was lost or slow has passed
            if not await self.adopt():
                raise Broken("a run without faults does not start")
        self.rate = rate
        await self._until(self.train(6), NEVER_S)
        self.rate = 0.0
        await self.clock.sleep(NEVER_S / 100)
        for engine in self.engines:
            if self.updater.fleet._failures[engine.engine_id] >= TRIES_MAX:
                await self.joins(self.updater, engine)
        await self._until(self.train(2), NEVER_S)  # heals whoever is fenced still
        current = self.updater.current
        assert current is not None
        behind = [e.engine_id for e in self.engines if e.root != current.root or e.holds is None]
        if current.counter == 0 or behind:
            raise Broken(f"faults stopped, {behind} do not hold {current.label}")
        for log in self.logs:
            for rule in RULES:
                for fault in rule(log):
                    raise Broken(f"{rule.__name__}: {fault}")


def run_world(seed: int) -> Counter[str]:
    """One world; what happened in it. Raises Broken."""
    loop = VirtualLoop(seed, seconds_max=20 * NEVER_S)
    world = World(seed, loop)

    async def main() -> None:
        try:
            await asyncio.wait_for(world.live(), WORLD_S)
        finally:
            left = world.tasks | world.joining
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    logging.getLogger("turnout.transfer.fleet").setLevel(logging.ERROR)
    try:
        loop.run_until_complete(main())
    except (Broken, Stuck, AssertionError, TurnoutError, TimeoutError, KeyError) as fault:
        raise Broken(f"seed {seed}: {type(fault).__name__}: {fault}") from fault
    finally:
        loop.discard()
    return world.counts
