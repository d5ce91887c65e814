"""The engines of a run: started side by side, or asked where somebody else runs them; watched while it works, added
and removed, stopped with it.

Promises: one watch for each engine (turnout.schedule.engine_lives), also for one that comes later; where too few
engines are left for an update the run ends with the last death; after `stop` no process of an engine is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from turnout.core.errors import ConfigError, EngineDead, EngineError, InvariantBroken
from turnout.core.ports import Clock, EventSink
from turnout.core.waits import Waits
from turnout.placement.processes import OwnProcess
from turnout.schedule.engine_lives import Around, Care, EngineLives
from turnout.schedule.run_router import RunRouter
from turnout.serving.client import EngineClient
from turnout.serving.health_machine import Health, Sign
from turnout.serving.launcher import Engine
from turnout.serving.roster import EnginePlan, Program, sides
from turnout.weights.quorum import lacking

LAST_WORDS_S = 2.0
LATE_S = 5.0  # as long all engines are waited for, even where fewer would do


class RunEngines(EngineLives):
    """See the module. `router` stands before them, where there is one."""

    def __init__(
        self,
        start: Callable[[EnginePlan], Awaitable[Engine]],
        events: EventSink,
        clock: Clock,
        waits: Waits,
        router: RunRouter | None = None,
    ) -> None:
        super().__init__(start, events, clock, waits)
        self.router = router
        self._watched: tuple[Care, Around] | None = None
        self._watches: dict[str, asyncio.Task[EngineDead]] = {}
        self._news = asyncio.Event()

    async def begin(self, plans: Sequence[EnginePlan], needed: int) -> None:
        """Starts all of them. Raises what went wrong, of all. Of engines that somebody else runs it is enough that
        `needed` answer: the others may be late, and join when they do."""
        tasks = [asyncio.ensure_future(self.start(plan)) for plan in plans]
        external = all(plan.program is Program.EXTERNAL for plan in plans)
        pending, end, wrong = set(tasks), self._clock.now() + LATE_S, False
        try:
            while pending and not wrong:
                left = max(0.0, end - self._clock.now()) if external else 0.0
                if external and not left and len(self._engines) >= needed:
                    break
                done, pending = await asyncio.wait(
                    pending, timeout=left or None, return_when=asyncio.FIRST_COMPLETED
                )
                wrong = any(isinstance(task.exception(), ConfigError) for task in done)
        finally:
            for task in pending:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        faults = [fault for fault in results if isinstance(fault, BaseException)]
        _raise_all(faults, enough=external and len(self._engines) >= needed)

    async def add(self, plan: EnginePlan) -> EngineClient:
        """While `during` runs: starts an engine, or connects to it, and has it join and watched. Raises EngineError
        or ConfigError where it does not serve; nothing is left of it then."""
        try:
            await self.start(plan)
        except BaseException:
            self.forget(plan.engine_id)
            raise
        self._watch(plan.engine_id, new=True)
        return self._engines[plan.engine_id].client

    def expect(self, plan: EnginePlan) -> None:
        """While `during` runs: has an engine join once it answers."""
        self._plans[plan.engine_id] = plan
        self._health[plan.engine_id] = Health()
        self._watch(plan.engine_id)

    async def remove(self, name: str) -> None:
        """The run has no such engine any more; a process of ours is stopped."""
        if (watch := self._watches.pop(name, None)) is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        if name in self.up():
            self._health[name] = self._health[name].after(Sign.ENDED)
        if name in self._engines:
            await self._engines[name].stop()
        self.forget(name)  # not before: `stop` must find it where the run ends meanwhile

    async def during(self, work: Coroutine[Any, Any, None], care: Care, around: Around) -> None:
        """Runs `work` beside a watch on every engine. Raises EngineDead where those that are left are too few."""
        main = asyncio.ensure_future(work)
        self._watched = care, around
        for name in self._plans:
            self._watch(name)
        try:
            while not main.done():
                await self._something(main)
                if main.done() and main.exception() is not None and self._watches:
                    # A cut connection is often the first sign of a death; the process tells more.
                    lives = self._watches.values()
                    await asyncio.wait(lives, timeout=LAST_WORDS_S, return_when=asyncio.FIRST_COMPLETED)
                for name in [name for name, watch in self._watches.items() if watch.done()]:
                    death, plan = self._watches.pop(name).result(), self._plans[name]
                    left = [other for other in self._watches if self._plans[other].model == plan.model]
                    fewest, halves = care.needed.get(plan.model, (0, ()))
                    if plan.updated:  # they come and go, and what an external one does is known by its answer
                        halves = sides(client.plan for client in self.updated)
                    if lacking(left, fewest, halves):
                        raise death
                    around.lost(death, f"the run goes on with {len(left)} of the model {plan.model!r}")
            main.result()
        finally:
            self._watched, tasks = None, (main, *self._watches.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _something(self, main: asyncio.Future[None]) -> None:
        """Waits for the end of the work or of an engine, or for an engine that is added."""
        self._news.clear()
        news = asyncio.ensure_future(self._news.wait())
        await asyncio.wait({main, news, *self._watches.values()}, return_when=asyncio.FIRST_COMPLETED)
        news.cancel()
        await asyncio.gather(news, return_exceptions=True)

    def _watch(self, name: str, new: bool = False) -> None:
        if self._watched is None:
            raise InvariantBroken("engines are added while the run watches them")
        self._watches[name] = asyncio.ensure_future(self.lives(name, *self._watched, new))
        self._news.set()

    async def stop_updated(self) -> None:
        """Stops those that weight updates go to."""
        await asyncio.gather(*(self._engines[client.engine_id].stop() for client in self.updated))

    async def leave(self) -> dict[str, OwnProcess]:
        """For the next incarnation in this process: our embedded engines that are up, asked nothing more. `stop`
        ends the others."""
        left: dict[str, OwnProcess] = {}
        for name in self.up():
            process = self._engines[name].process
            if self._plans[name].program is Program.EMBEDDED and isinstance(process, OwnProcess):
                await self._engines.pop(name).client.close()
                left[name] = process
        return left

    async def stop(self) -> list[str]:
        """Stops all of them; what could not be stopped."""
        engines = self._engines.values()
        stopped = await asyncio.gather(*(engine.stop() for engine in engines), return_exceptions=True)
        if self.router is not None:
            await self.router.stop()
        faults = [str(fault) for fault in stopped if isinstance(fault, BaseException)]
        ours = [engine.process for engine in engines if engine.process.pid is not None]
        return faults + [f"process {process.pid}" for process in ours if process.alive]


def _raise_all(faults: list[BaseException], enough: bool) -> None:
    """All that a user can mend at once; else engines that did not answer, where the run can't do without them."""
    mend = [fault for wrong in faults if isinstance(wrong, ConfigError) for fault in wrong.faults]
    if mend:
        raise ConfigError(mend)
    silent = [fault for fault in faults if isinstance(fault, EngineError)]
    for fault in faults:
        if not isinstance(fault, EngineError | asyncio.CancelledError):
            raise fault
    if len(silent) == 1 and not enough:
        raise silent[0]
    if silent and not enough:
        names, why = ", ".join(f.engine_id for f in silent), "; ".join(f.reason for f in silent)
        raise EngineError(names, "start", "none", why)
