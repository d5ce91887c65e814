"""One virtual world from one seed: its engines and its disk go on while controllers come and go.

Owns the loop, the engines, the folder that stands for the disk, and the faults that come from outside: engines that
die, start again or are slow, controllers that are killed. Promises: a world ends with a run that has finished, or
with a Failure that says why it did not; the last lives meet no faults, so a run that can't go on shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import random
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from turnout.core.errors import IllegalTransition, InvariantBroken, TurnoutError
from turnout.core.events import Event, GroupTrained, VersionCommitted, VersionPublished
from turnout.placement.processes import collector_off
from turnout.protocol.sglang import GenerateRequest
from turnout.serving.roster import WorkerType
from turnout.sim.checks import check
from turnout.sim.controller import Controller
from turnout.sim.disk import after_kill
from turnout.sim.engine import VirtualEngine
from turnout.sim.faults import Faults
from turnout.sim.folders import PREFIX, in_memory
from turnout.sim.loop import LIFE, CallbackRaised, Killed, Life, Stuck, VirtualClock, VirtualLoop
from turnout.sim.model import root_after
from turnout.sim.pairs import Rooms
from turnout.sim.plan import WorldPlan, plan_of, prompts_of
from turnout.sim.record import Told, WorldRecord
from turnout.sim.report import COUNTS, STUCK, SeedReport, WorldOptions

LIVES_MAX, LIVES_CALM = 12, 3  # controllers of one run, and how many of the last of them meet no fault
CRASHES_MAX = 4  # kills of controllers by their count of callbacks
CALLBACKS = 4000  # of a controller, about, before it is killed
TROUBLE_S = 10.0  # between two draws of trouble with engines
RESTART_S = (0.5, 20.0)
EXPECTED_ENDS = ("the run ended", "all rewards equal")  # of groups, whatever happened


class World:
    """See the module. `root` is the disk as the present controller sees it."""

    def __init__(self, seed: int, plan: WorldPlan, options: WorldOptions, folder: Path) -> None:
        self.seed, self.plan = seed, plan
        self.rng = random.Random(f"world/{seed}")
        self.loop = VirtualLoop(seed)
        self.clock = VirtualClock(self.loop)
        self.trace: list[str] = []
        self._tracing = options.trace
        self.faults = Faults(random.Random(f"faults/{seed}"), options.kinds, self.note)
        self.record = WorldRecord(plan.rules, root_after(b""), prompts_of(seed), plan.evals)
        self._folder, self.root = folder, folder / "0"
        self.root.mkdir()
        self._context = contextvars.copy_context()
        self._crashes = self.rng.randint(0, CRASHES_MAX)
        self.controller: Controller | None = None
        self.engines = [
            VirtualEngine(f"e{n}", shape, self.record.base_root, self) for n, shape in enumerate(plan.engines)
        ]
        rooms = Rooms(self.later, self.faults.uniform)
        for n, engine in enumerate(self.engines if plan.prefills else ()):
            engine.half = WorkerType.PREFILL if n < plan.prefills else WorkerType.DECODE
            engine.rooms = rooms

    # the ports that live longer than a controller

    def later(self, seconds: float, call: Callable[..., object], *args: Any) -> Any:
        return self.loop.call_later(seconds, call, *args, context=self._context)

    def note(self, who: str, what: str) -> None:
        if self._tracing:
            self.trace.append(f"{self.loop.at:10.3f}  {who:<14} {what}")

    def told(self, event: Event, life: int) -> None:
        """An event of a controller, as it is written."""
        self.record.told.append(Told(self.loop.at, life, event))
        if self._tracing:
            self.note(f"controller {life}", repr(event))

    def sent(self, engine: VirtualEngine, request: GenerateRequest) -> None:
        """Invariant 4, by the engine's true weights, at the moment at which a request is sent to it."""
        if not engine.alive or self.controller is None:
            return
        found = self.controller.committed_step(engine.root)
        where = f"t={self.loop.at:.1f}: request {request.rid[:8]} to {engine.name}"
        if found is None:
            self.record.broken(f"{where}, which holds {engine.root[:16]}, not committed")
        elif not 0 <= self.controller.current_step - found <= self.plan.rules.engine_lag:
            behind = self.controller.current_step - found
            self.record.broken(f"{where}, which is {behind} train steps behind")

    # engines

    def kill_engine(self, engine: VirtualEngine) -> None:
        """It dies now; its watcher sees it at once; it starts again later."""
        if not engine.alive:
            return
        self.note(engine.name, f"dies with {engine.load} requests")
        engine.die()
        self.later(self.faults.uniform(*RESTART_S), self._start_engine, engine)
        if self.controller is not None:
            self.controller.engine_died(engine)

    def _start_engine(self, engine: VirtualEngine) -> None:
        if engine.alive:
            return
        engine.start()
        self.note(engine.name, "started again")
        if self.controller is not None:
            self.controller.engine_started(engine)

    def _trouble(self) -> None:
        """From time to time something befalls a busy engine."""
        self.later(self.rng.uniform(0.1, 2 * TROUBLE_S), self._trouble)
        busy = [engine for engine in self.engines if engine.alive and (engine.load or engine.updating)]
        if not busy:
            return
        engine = self.rng.choice(busy)
        if self.faults.hit("engine_crash", 0.05, engine.name):
            with contextlib.suppress(Killed):  # the controller, at the event that tells of it
                self.kill_engine(engine)
        elif self.faults.hit("slow_engine", 0.1, engine.name):
            engine.slowed = 10.0
            self.later(self.faults.uniform(1.0, 30.0), setattr, engine, "slowed", 1.0)

    # controllers

    async def live(self) -> None:
        """The whole run."""
        self.later(TROUBLE_S, self._trouble)
        for number in range(LIVES_MAX):
            self.record.lives = number + 1
            self.faults.calm = number >= LIVES_MAX - LIVES_CALM
            crash_at = None
            if self.faults.on("controller_crash") and number < self._crashes:
                crash_at = 1 + int(self.rng.expovariate(1 / CALLBACKS))
            if self.faults.on("stopped") and self.rng.random() < 0.2:
                self.later(self.rng.uniform(1.0, 200.0), self._stop, number)
            if await self._life(Life(f"controller {number}", crash_at), number):
                return
            await self.clock.sleep(self.faults.uniform(*RESTART_S))
        self.record.broken(f"after {LIVES_MAX} controllers the run has not finished", STUCK)

    def _stop(self, number: int) -> None:
        if self.controller is not None and self.record.lives == number + 1 and self.controller.stop():
            self.faults.count("stopped", f"controller {number}")

    async def _life(self, life: Life, number: int) -> bool:
        """One controller; whether the run has finished, or never will."""
        for engine in self.engines:  # a run begins when all of its engines are up
            self._start_engine(engine)
        ended: asyncio.Future[None] = self.loop.create_future()
        token = LIFE.set(life)
        try:
            self.controller = Controller(self, life, number)
            task = asyncio.ensure_future(self.controller.run())
        finally:
            LIFE.reset(token)

        def over(_: object = None) -> None:
            if not ended.done():
                ended.set_result(None)

        def killed() -> None:
            """SIGKILL: the disk is as it is now, connections close, nothing more is done."""
            self.note(life.name, "KILLED")
            self.root = after_kill(self.root, self._folder / str(number + 1))
            for engine in self.engines:
                self.later(0.01, engine.abort, None, "the connection was closed")
            over()

        life.on_kill = killed
        task.add_done_callback(over, context=self._context)
        await ended
        controller, self.controller = self.controller, None
        if not life.alive:
            if life.callbacks == life.crash_at:
                self.faults.count("controller_crash", life.name)
            return False
        life.on_kill = lambda: None
        life.alive = False
        return self._ended(controller, task)

    def _ended(self, controller: Controller, task: asyncio.Task[None]) -> bool:
        fault = task.exception()
        self.record.ledger = controller.close_ledger()
        if fault is None:
            self.record.final_root = controller.trained_root
            self.note("run", f"finished with {self.record.final_root}")
            return True
        text = f"{type(fault).__name__}: {fault}"
        self.note("run", f"ended: {text}")
        loud = isinstance(fault, TurnoutError | OSError | Killed)
        if not loud or isinstance(fault, InvariantBroken | IllegalTransition):
            self.record.broken(f"a controller ended with {text}")
            return True
        if self.faults.calm or not self.faults.counts:
            self.record.broken(f"a run without faults ended with {text}", STUCK)
            return True
        return False


@collector_off()  # a world is gone as a whole in a second: looking for garbage is a tenth of its cost
def run_world(seed: int, plan: WorldPlan, options: WorldOptions) -> SeedReport:
    """One world, from its beginning to what the checkers say of it."""
    folder = Path(
        tempfile.mkdtemp(prefix=PREFIX, dir=in_memory() if options.folder is None else options.folder)
    )
    said = logging.getLogger("turnout")
    level = said.level
    said.setLevel(logging.CRITICAL)
    try:
        world = World(seed, plan, options, folder)
        try:
            world.loop.run_until_complete(world.live())
        except Stuck as fault:
            world.record.broken(str(fault), STUCK)
        except CallbackRaised as fault:
            world.record.broken(f"a callback raised {fault}")
        world.loop.discard()
        for fault in world.loop.faults:
            world.record.broken(f"raised, and nobody looked: {type(fault).__name__}: {fault}")
        report = _report(world)
        vars(world).clear()  # its parts hold one another through it: most of them go at once
        return report
    finally:
        said.setLevel(level)
        shutil.rmtree(folder, ignore_errors=True)


def run_seed(seed: int, options: WorldOptions) -> SeedReport:
    """The world of a seed. In deterministic mode what comes out must be what comes out without faults, unless some
    of them cost a group."""
    plan = plan_of(seed, options.schedule)
    report = run_world(seed, plan, options)
    whole = not report.happened["dropped"]
    if plan.config.deterministic and options.kinds and whole and not report.failures:
        calm = run_world(seed, plan, replace(options, kinds=(), trace=False))
        if calm.final_root != report.final_root:
            text = f"the run ended with {report.final_root}, without faults it ends with {calm.final_root}"
            report.failures.append(text)
            report.counts["invariant_failures"] += 1
    return report


def _report(world: World) -> SeedReport:
    failures = check(world.record)
    found = SeedReport(world.seed, world.plan.config.schedule, virtual_seconds=world.loop.at)
    found.counts = Counter({name: sum(f.count == name for f in failures) for name in COUNTS})
    found.failures = [f"{failure.count}: {failure.text}" for failure in failures]
    found.faults = world.faults.counts
    found.final_root = world.record.final_root
    found.trace = world.trace
    lags: dict[int, set[int]] = defaultdict(set)
    for one in world.record.told:
        if isinstance(one.event, GroupTrained):
            lags[one.event.step].add(one.event.lag)
    found.lags = {step: tuple(sorted(values)) for step, values in lags.items()}
    published = {e.event.version for e in world.record.told if isinstance(e.event, VersionPublished)}
    committed = {e.event.version for e in world.record.told if isinstance(e.event, VersionCommitted)}
    found.happened.update(
        controllers=world.record.lives,
        versions_committed=len(committed & published),
        train_steps=len(world.record.history.steps) - world.record.lives,
        groups=len(world.record.ledger),
        dropped=sum(row.cause not in (None, *EXPECTED_ENDS) for row in world.record.ledger),
        retracted=sum(engine.retracted for engine in world.engines),
    )
    return found
