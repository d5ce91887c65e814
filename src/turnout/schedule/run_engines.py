"""The engines that a run starts itself: started side by side, watched while it works, stopped with it.

Promises: an engine that ends, or answers no probe, is told once, with its phase and its last version; where too few
are left for an update the run ends with that; after `stop` no process of an engine is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from turnout.core.errors import EngineDead
from turnout.core.events import EngineReady
from turnout.core.ports import Clock, EventSink
from turnout.observe.run_view import EngineView
from turnout.serving.client import EngineClient
from turnout.serving.launcher import Engine, HealthProbe

LAST_WORDS_S = 2.0


@dataclass(frozen=True)
class Watch:
    """How engines are watched. `needed`: how many the run can't do without; `phase` is what it is at."""

    probe: HealthProbe
    needed: int
    phase: Callable[[], str]
    lost: Callable[[EngineDead], None]


class RunEngines:
    """See the module. `start` starts the engine of an index; it raises with nothing left running."""

    def __init__(self, start: Callable[[int], Awaitable[Engine]], events: EventSink, clock: Clock) -> None:
        self._start, self._events, self._clock = start, events, clock
        self._engines: dict[int, Engine] = {}

    @property
    def clients(self) -> list[EngineClient]:
        return [engine.client for _, engine in sorted(self._engines.items())]

    def views(self) -> tuple[EngineView, ...]:
        engines = (engine for _, engine in sorted(self._engines.items()))
        return tuple(EngineView(e.engine_id, _state_of(e), e.client.version) for e in engines)

    async def start(self, index: int) -> None:
        engine = self._engines[index] = await self._start(index)
        url, pid = engine.client.address.url, engine.process.pid
        self._events.emit(EngineReady(engine.engine_id, url, pid, engine.client.version))

    async def during(self, work: Coroutine[Any, Any, None], watch: Watch) -> None:
        """Runs `work` beside a watch on every engine. Raises EngineDead with fewer than `watch.needed` left."""
        main = asyncio.ensure_future(work)
        deaths = {asyncio.ensure_future(self._death(engine, watch)) for engine in self._engines.values()}
        watches, left = tuple(deaths), len(deaths)
        try:
            while not main.done():
                await asyncio.wait({main, *deaths}, return_when=asyncio.FIRST_COMPLETED)
                if main.done() and main.exception() is not None and deaths:
                    # A cut connection is often the first sign of a death; the process tells more.
                    await asyncio.wait(deaths, timeout=LAST_WORDS_S, return_when=asyncio.FIRST_COMPLETED)
                for death in [death for death in deaths if death.done()]:
                    deaths.discard(death)
                    left -= 1
                    if left < watch.needed:
                        raise death.result()
                    watch.lost(death.result())
            main.result()
        finally:
            for task in (main, *watches):
                task.cancel()
            await asyncio.gather(main, *watches, return_exceptions=True)

    async def _death(self, engine: Engine, watch: Watch) -> EngineDead:
        """Waits for the process to end or to answer no more."""
        signs = [
            asyncio.ensure_future(engine.dies(watch.phase)),
            asyncio.ensure_future(engine.hangs(watch.phase, watch.probe, self._clock)),
        ]
        try:
            done, _ = await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for sign in signs:
                sign.cancel()
            await asyncio.gather(*signs, return_exceptions=True)

    async def stop(self) -> list[str]:
        """Stops all of them; what could not be stopped."""
        engines = self._engines.values()
        stopped = await asyncio.gather(*(engine.stop() for engine in engines), return_exceptions=True)
        faults = [str(fault) for fault in stopped if isinstance(fault, BaseException)]
        return faults + [f"process {engine.process.pid}" for engine in engines if engine.process.alive]


def _state_of(engine: Engine) -> str:
    if not engine.process.alive:
        return "dead"
    return "fenced" if engine.client.holds is None and engine.client.version != "none" else "ready"
