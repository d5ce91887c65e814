"""The lives of a run's engines: what of each was asked for, runs now, and is known of its health.

Promises: an engine that ends, or answers no probe, is told once for each of its lives, with its phase and its last
version; what of it still runs then is killed before it is started again. A new life has the same id and another
port, and takes part only as the updater lets it join. Restarts have a budget and growing pauses. One that somebody
else runs is never stopped, nor started: its next life begins when something answers at its address again, for which
it is asked without a limit, as it is for its first one, with restarts or without.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from turnout.core.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineBusy,
    EngineDead,
    EngineError,
    EngineRefused,
    EngineReplaced,
)
from turnout.core.events import EngineReady
from turnout.core.ports import Clock, EventSink
from turnout.core.waits import ENGINES, Waits
from turnout.observe.run_view import EngineView
from turnout.placement.processes import ODD_STATES, STOPPED
from turnout.placement.tasks import first
from turnout.serving.client import EngineClient
from turnout.serving.health_machine import WINDOW_S, Health, Life, Sign
from turnout.serving.launcher import STOP_GRACE_S, Engine
from turnout.serving.roster import EnginePlan, Program
from turnout.serving.work import Work
from turnout.weights.quorum import Sides


@dataclass(frozen=True)
class Probes:
    """When an engine that is alive counts as dead: `failures` probes in a row, `interval_s` apart, each without a
    good answer within `timeout_s`; the first of each life after `first_wait_s`."""

    interval_s: float
    timeout_s: float
    failures: int = 3
    first_wait_s: float = 0.0


async def at_once() -> None:
    """There is always room."""


@dataclass(frozen=True)
class Around:
    """What the engines have to do with. `phase`: what the run is at; `lost`: told of a death and what follows;
    `joins`: takes a new life in, which EngineDead ends; `unasked`: why an engine that is alive will never be asked
    again (empty: it will); `changing`: its weights are being put into place, and it may be late to answer, unless
    its process stands still; `room`: returns when there is memory for an engine."""

    phase: Callable[[], str]
    lost: Callable[[EngineDead, str], None]
    joins: Callable[[EngineClient], Awaitable[None]]
    unasked: Callable[[str], str]
    changing: Callable[[str], bool]
    room: Callable[[], Awaitable[None]] = at_once


@dataclass(frozen=True)
class Care:
    """How engines are watched, how often one may be started again (turnout.serving.health_machine), and how many of
    each model, and which of them, the run can't do without (turnout.weights.quorum; none of one not named)."""

    probes: Probes
    restarts: int
    needed: Mapping[str, tuple[int, Sides]]


class EngineLives:
    """See the module. `start` starts the engine of a plan; it raises with nothing left running. Engines are known
    by their ids, in the order in which they were first asked for."""

    def __init__(
        self,
        start: Callable[[EnginePlan], Awaitable[Engine]],
        events: EventSink,
        clock: Clock,
        waits: Waits,
    ) -> None:
        self._start, self._events, self._clock, self._waits = start, events, clock, waits
        self._plans: dict[str, EnginePlan] = {}
        self._engines: dict[str, Engine] = {}
        self._health: dict[str, Health] = {}

    @property
    def updated(self) -> list[EngineClient]:
        """The engines that weight updates go to, of those that have served."""
        return self._clients(updated=True)

    @property
    def others(self) -> list[EngineClient]:
        """The engines that no weight update goes to."""
        return self._clients(updated=False)

    def _clients(self, updated: bool) -> list[EngineClient]:
        found = [self._engines.get(name) for name, plan in self.plans.items() if plan.updated == updated]
        return [engine.client for engine in found if engine is not None]

    @property
    def kept(self) -> frozenset[str]:
        """Those that the controller before this one started."""
        return frozenset(name for name, engine in self._engines.items() if engine.kept)

    def views(self) -> tuple[EngineView, ...]:
        return tuple(self._view(name) for name in self._plans)

    def _view(self, name: str) -> EngineView:
        if (engine := self._engines.get(name)) is None:
            return EngineView(name, Life.STARTING.value, "none")
        return EngineView(name, _state_of(engine, self._health[name]), _held(engine))

    @property
    def plans(self) -> dict[str, EnginePlan]:
        """What was asked for, by engine id; a copy, since rewards ask for engines from other threads."""
        return dict(self._plans)

    def client(self, name: str) -> EngineClient | None:
        """None: it has not served yet."""
        engine = self._engines.get(name)
        return None if engine is None else engine.client

    def pid(self, name: str) -> int | None:
        """The process of its present life; None: there is none of ours."""
        engine = self._engines.get(name)
        return None if engine is None else engine.process.pid

    def forget(self, name: str) -> None:
        for table in (self._plans, self._engines, self._health):
            table.pop(name, None)

    async def start(self, plan: EnginePlan) -> None:
        name = plan.engine_id
        self._plans[name] = plan
        health = self._health.setdefault(name, Health())
        with self._waits(ENGINES, f"engine {name}", "it to serve"):
            engine = self._engines[name] = await self._start(plan)
        self._health[name] = health.after(Sign.SERVES)
        engine.client.work = Work(name, self._events, engine.client.clock)
        what = (plan.updated, plan.model, plan.worker_type.value, list(plan.devices))
        url, pid = engine.client.address.url, engine.process.pid
        self._events.emit(EngineReady(engine.engine_id, url, pid, engine.client.version, *what))

    def facts(self) -> dict[str, str]:
        """What there is to say of an engine that is waited for."""
        found: dict[str, str] = {}
        for name, engine in self._engines.items():
            silent = self._health[name].silent
            said = [f"{silent} health probes without an answer"] if silent else []
            if (state := engine.process.state) in ODD_STATES:
                said.append(f"process {engine.process.pid} {ODD_STATES[state]}")
            if said:
                found[f"engine {name}"] = ", ".join(said)
        return found

    def up(self) -> list[str]:
        """The ids of those that run, as far as is known."""
        up = (Life.UP, Life.SUSPECT)
        return [name for name in self._engines if self._health[name].state in up]

    async def lives(self, name: str, care: Care, around: Around, new: bool) -> EngineDead:
        """Watches an engine and starts it again, as often as the budget allows. Why its last life ended. `new`: it
        has yet to join."""
        external = self._plans[name].program is Program.EXTERNAL
        again = "asked" if external else "started"
        if name not in self._engines:
            death = await self._next_life(name, care, around)
        else:
            death = await (self._newcomer if new else self._death)(name, care, around)
        while True:
            endless = external and (care.restarts or name not in self._engines)
            restarts = sys.maxsize if endless else care.restarts
            self._health[name], pause_s = self._health[name].again(restarts, self._clock.now())
            if pause_s is None and restarts:
                spent = f"{death.reason}; it was started again {restarts} times in {WINDOW_S:.0f} s"
                return EngineDead(death.engine_id, death.phase, death.last_version, spent)
            if pause_s is None:
                return death
            around.lost(death, f"it is {again} again in {pause_s:g} s")
            with self._waits(ENGINES, f"engine {name}", "its next life"):
                if name in self._engines:
                    await self._engines[name].process.stop(STOP_GRACE_S)
                await self._clock.sleep(pause_s)
            death = await self._next_life(name, care, around)

    async def _next_life(self, name: str, care: Care, around: Around) -> EngineDead:
        """Starts the engine and has it join; why this life ended."""
        before = self.client(name)
        try:
            await around.room()
            await self.start(self._plans[name])
        except (EngineError, ConfigError) as fault:
            self._health[name] = self._health[name].after(Sign.ENDED)
            why = fault.reason if isinstance(fault, EngineError) else str(fault)
            return EngineDead(name, "start", "none", why)
        try:
            return await self._newcomer(name, care, around)
        finally:
            if before is not None:
                await before.close()  # until the new life had joined, an update still asked the old one

    async def _newcomer(self, name: str, care: Care, around: Around) -> EngineDead:
        """Has an engine that serves join; why this life ended."""
        joins = asyncio.ensure_future(around.joins(self._engines[name].client))
        death = asyncio.ensure_future(self._death(name, care, around))
        try:
            with self._waits(ENGINES, f"engine {name}", "it to hold the current version"):
                await asyncio.wait({joins, death}, return_when=asyncio.FIRST_COMPLETED)
            fault = joins.exception() if joins.done() else None
            if isinstance(fault, EngineDead) and not death.done():
                self._health[name] = self._health[name].after(Sign.ENDED)
                return fault
            if fault is not None and not isinstance(fault, EngineDead):
                raise fault
            return await death
        finally:
            for task in (joins, death):
                task.cancel()
            await asyncio.gather(joins, death, return_exceptions=True)

    async def _death(self, name: str, care: Care, around: Around) -> EngineDead:
        """Waits until the process has ended or counts as dead."""
        engine = self._engines[name]
        how = await first(engine.process.ended(), self._fails(name, care, around))
        if self._health[name].state is not Life.DOWN:
            self._health[name] = self._health[name].after(Sign.ENDED)
        return EngineDead(engine.engine_id, around.phase(), engine.client.version, how)

    async def _fails(self, name: str, care: Care, around: Around) -> str:
        """Probes the engine until it counts as dead, or until no update asks it any more and it may start again."""
        engine, probes = self._engines[name], care.probes
        await self._clock.sleep(probes.first_wait_s)
        while True:
            await self._clock.sleep(probes.interval_s)
            try:
                if around.changing(name) and engine.process.state != STOPPED:
                    await engine.keep(probes.timeout_s)
                    continue
                sign, reason = await _probed(engine, probes.timeout_s)
            except EngineReplaced as fault:
                return fault.reason
            health = self._health[name] = self._health[name].after(sign, probes.failures)
            if health.state is Life.DOWN:
                return f"{health.silent} health probes in a row failed, the last with: {reason}"
            unasked = around.unasked(engine.engine_id)
            if unasked and care.restarts:
                return unasked


async def _probed(engine: Engine, timeout_s: float) -> tuple[Sign, str]:
    """What a probe tells. An engine that refuses or is busy is alive. Raises EngineReplaced."""
    try:
        await engine.probe(timeout_s)
    except EngineReplaced:
        raise
    except (EngineBusy, EngineRefused):
        return Sign.ANSWERED, ""
    except (EngineError, DeadlineExceeded) as fault:
        return Sign.SILENT, str(fault)
    return Sign.ANSWERED, ""


def _held(engine: Engine) -> str:
    """What is shown of its weights."""
    return engine.client.version if engine.client.plan.updated else f"model {engine.client.plan.model}"


def _state_of(engine: Engine, health: Health) -> str:
    if health.state in (Life.STARTING, Life.SUSPECT):
        return health.state.value
    if health.state in (Life.DOWN, Life.GONE) or not engine.process.alive:
        return "dead"
    client = engine.client
    return "fenced" if client.plan.updated and client.holds is None and client.version != "none" else "ready"
