"""Engines that come to a run and leave it while it works; one path, whoever asks (`turnout engines`, a file).

Promises: a new engine takes part only as the updater lets it join; one that leaves is asked for nothing from the
moment on, what it was making goes on elsewhere from the tokens there are, and a process of ours is stopped; fewer
engines than the run can't do without are never left; a change is done or refused, and nothing of it outlives the
run.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from turnout.core.errors import ConfigError, DeadlineExceeded, EngineError, TurnoutError
from turnout.core.events import EngineRemoved
from turnout.core.ports import Clock, EventSink
from turnout.schedule.run_engines import RunEngines
from turnout.serving.external import plans_of
from turnout.serving.roster import EnginePlan, Program, sides
from turnout.transfer.updater import Updater
from turnout.weights.quorum import lacking

POLL_S = 0.1


class Refused(TurnoutError):
    """A change that is not made."""


@dataclass(frozen=True)
class Limits:
    """How many engines the run can't do without, and how long an update and a join may take."""

    needed: int
    join_s: float


class EngineChanges:
    """See the module. One change at a time."""

    def __init__(self, engines: RunEngines, updater: Updater, events: EventSink, limits: Limits) -> None:
        self.engines, self._updater, self._events, self._limits = engines, updater, events, limits
        self._lock = asyncio.Lock()
        self._made = 0
        self.listed: frozenset[str] = frozenset()  # by the file of addresses, which decides about them
        self._left: set[str] = set()

    @property
    def _clock(self) -> Clock:
        return self._updater.clock

    async def add_addresses(self, addresses: tuple[str, ...]) -> str:
        """Engines that somebody else runs. Raises Refused; those before the one that failed have joined."""
        try:
            plans = plans_of(addresses, "address")
        except ConfigError as fault:
            raise Refused(str(fault)) from fault
        return "; ".join([await self._add(plan) for plan in plans])

    async def add_own(self, count: int) -> str:
        """So many more of the run's own engines, like the last of them."""
        told: list[str] = []
        for _ in range(count):
            own = [plan for plan in self.engines.plans.values() if plan.updated and plan.address is None]
            if not own:
                raise Refused("the run starts no engines: give the address of one")
            if own[-1].program is Program.SGLANG and own[-1].devices:
                raise Refused("no device is free for one more engine")
            told.append(await self._add(replace(own[-1], engine_id=self._free_id(own[-1]), devices=())))
        return "; ".join(told)

    async def remove(self, name: str, why: str) -> str:
        """Takes an engine out. Raises Refused."""
        async with self._lock:
            plan = self.engines.plans.get(name)
            if plan is None:
                known = ", ".join(self.engines.plans) or "none"
                raise Refused(f"the run has no engine {name}; it has {known}")
            if not plan.updated:
                raise Refused(f"engine {name} serves {plan.model}, which this command does not change")
            self._check_left(name)
            client = self.engines.client(name)
            try:
                await self._leave(name, why)
            except DeadlineExceeded as fault:
                raise Refused(f"engine {name} is asked no more, but has not left: {fault}") from fault
            self._left.add(name)
            await self.engines.remove(name)
            self._events.emit(EngineRemoved(name, "none" if client is None else client.version, why))
            return f"engine {name} has left"

    async def _leave(self, name: str, why: str) -> None:
        """Raises Refused, with the engine back, where others ended while an update was waited for."""
        await self._updater.leave(name, why, self._limits.join_s)
        try:
            self._check_left(name)
        except Refused:
            if (client := self.engines.client(name)) is not None:
                await self._updater.join(client, self._limits.join_s)
            raise

    def _check_left(self, name: str) -> None:
        """Those that have yet to prove a version can't be asked, and don't count."""
        engines, up = self.engines.updated, set(self.engines.up()) - {name}
        left = [engine.engine_id for engine in engines if engine.holds is not None and engine.engine_id in up]
        lack = lacking(left, self._limits.needed, sides(engine.plan for engine in engines))
        if lack:
            raise Refused(f"engine {name} stays: {lack} (--min-engines {self._limits.needed})")

    async def _add(self, plan: EnginePlan) -> str:
        name = plan.engine_id
        async with self._lock:
            if name in self.engines.plans:
                raise Refused(f"the run has an engine {name} already")
            try:
                client = await self.engines.add(plan)
            except (EngineError, ConfigError) as fault:
                raise Refused(str(fault)) from fault

        async def joins() -> None:
            while client.holds is None:
                if self.engines.client(name) is not client:
                    raise Refused(f"engine {name} ended before it had joined")
                await self._clock.sleep(POLL_S)

        try:
            await self._clock.within(self._limits.join_s, f"engine {name} to join", joins())
        except DeadlineExceeded as fault:
            return f"engine {name} runs, and takes part once it has proved a version ({fault})"
        return f"engine {name} serves {client.version}"

    def _free_id(self, like: EnginePlan) -> str:
        """An id that no engine of the run has or had."""
        stem = like.engine_id.rpartition("-")[0]
        numbers = [int(tail) for name in {*self.engines.plans, *self._left}
                   if (tail := name.rpartition("-")[2]).isdigit() and name.startswith(stem)]  # fmt: skip
        self._made = max([self._made, *numbers]) + 1
        return f"{stem}-{self._made}"
