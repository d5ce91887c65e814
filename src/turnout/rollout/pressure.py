"""Asks the engines how loaded they are, tells admission, and has the newest groups cut where memory is short.

Promises: one report of each engine at a time, each with a deadline; an engine that does not answer has no part in
what is told, one that has no such report counts as calm; none at all stops admission until one answers again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from turnout.core.errors import EngineDead, EngineError, EngineRefused
from turnout.core.ports import Clock
from turnout.placement.tasks import together
from turnout.rollout.admission import Admission, EngineLoad
from turnout.serving.client import EngineClient

INTERVAL_S = 1.0
DEADLINE_S = 5.0
log = logging.getLogger(__name__)


class Rollouts(Protocol):
    """What is asked of the pool."""

    @property
    def in_flight(self) -> int: ...

    def admit(self, cut: int) -> None:
        """Cuts so many of the newest groups, and starts what may start."""
        ...


class PressureWatch:
    """See the module. `run` never ends by itself."""

    def __init__(
        self,
        admission: Admission,
        engines: Callable[[], Iterable[EngineClient]],
        rollouts: Rollouts,
        clock: Clock,
    ) -> None:
        self._admission, self._engines, self._rollouts, self._clock = admission, engines, rollouts, clock

    async def run(self) -> None:
        while True:
            await self.look()
            await self._clock.sleep(INTERVAL_S)

    async def look(self) -> None:
        """One round of reports."""
        found = await together(self._asked(engine) for engine in self._engines())
        loads = [load for load in found if load is not None]
        before = self._admission.limit
        cut = self._admission.report(loads, self._rollouts.in_flight)
        if self._admission.limit < before:
            log.info("engines are pressed: at most %d groups in flight, %d cut", self._admission.limit, cut)
        self._rollouts.admit(cut)

    async def _asked(self, engine: EngineClient) -> EngineLoad | None:
        try:
            return EngineLoad(*await engine.load_report(DEADLINE_S))
        except EngineRefused:
            return EngineLoad(0, 0, 0.0)
        except (EngineDead, EngineError):
            return None
