"""Evaluation points of a run: which are due, and what each came to.

Owns the points. Promises: a point is made while no update runs (the loop calls between commit and the next
rollout), it lands at the step of its version, and a step has at most one point of each set. The first set is
the one whose score the panel and the curve show.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from turnout.core.events import EvalDone
from turnout.core.ports import EventSink
from turnout.core.rng import SeedTree
from turnout.rollout.evaluate import EvalPoint, EvalSet, evaluate
from turnout.rollout.rewards import RewardRunner
from turnout.rollout.worker import Generator
from turnout.schedule.phases import Phases

EVAL_SEEDS = (0, ("eval",))  # not the run's seed: runs are compared on the same noise
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvalPlan:
    """`sets` are scored before training, every `interval` steps (None: never between) and after the last;
    `before_only` sets once, before."""

    sets: Sequence[EvalSet]
    before_only: Sequence[EvalSet]
    interval: int | None
    skip_before: bool


class EvalRuns:
    """Evaluations of the loop. `points` maps (set name, steps done) to the point."""

    def __init__(
        self, plan: EvalPlan, generator: Generator, rewards: RewardRunner, events: EventSink, phases: Phases
    ) -> None:
        self._plan, self._generator, self._rewards, self._events = plan, generator, rewards, events
        self._phases = phases
        self._seeds = SeedTree(*EVAL_SEEDS)
        self.points: dict[tuple[str, int], EvalPoint] = {}
        self.seconds = 0.0

    async def run_if_due(self, steps_done: int, last: bool) -> None:
        interval = self._plan.interval
        first = steps_done == 0 and not last
        if first and self._plan.skip_before:
            return
        if not (first or last or (interval is not None and steps_done % interval == 0)):
            return
        sets = [*self._plan.sets, *(self._plan.before_only if first else ())]
        with self._phases("evaluate") as phase:
            for data in sets:
                if (data.name, steps_done) not in self.points:
                    await self._point(data, steps_done)
        self.seconds += phase.seconds

    async def settled(self) -> None:
        """Evaluations run in line: between two calls of the loop none is under way."""

    def curve(self) -> tuple[tuple[int, float], ...]:
        """(steps done, score) of the first set."""
        name = self._plan.sets[0].name if self._plan.sets else ""
        return tuple((step, point.score) for (found, step), point in self.points.items() if found == name)

    def first_and_last(self, name: str) -> tuple[EvalPoint | None, EvalPoint | None]:
        """The point before training and the newest one of a set; None where there is none."""
        steps = [step for found, step in self.points if found == name]
        before = self.points.get((name, 0))
        return before, self.points[name, max(steps)] if steps and max(steps) > 0 else None

    async def _point(self, data: EvalSet, steps_done: int) -> None:
        point = await evaluate(self._generator, self._rewards, data, self._seeds)
        self.points[data.name, steps_done] = point
        counts = point.items, point.failed
        self._events.emit(EvalDone(data.name, point.version, steps_done, point.score, *counts, point.digest))
        if point.failed:
            log.warning(
                "evaluation %s at step %d: %d samples have no score", data.name, steps_done, point.failed
            )
