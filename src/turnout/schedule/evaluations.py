"""Evaluation points of a run: which are due, on which version, and what each came to.

Owns the points. Promises: a point names a version and lands at that version's step; its requests may be answered by
that version only; a step has at most one point of each set; where there can be none, EvalSkipped says why. The
first set is the one whose score the panel and the curve show.

`beside` (async): the evaluation runs while rollouts and training go on, and `settled`, which the next activation
awaits, holds that back until the evaluation's requests are done, at most `hold_s` seconds; the rest is cut then and
the point is not written. Without it the loop waits for the point: no update can come between. Mode `checkpoint`
asks nothing of the run's engines: the version is kept, and `kept` says what is to be scored after the run. In mode
`dedicated` engines of their own answer, one version after the other: the version is kept until then, training and
updates go on, and the end of the run waits `hold_s` seconds for what is pending.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from turnout.core.errors import DeadlineExceeded, TurnoutError
from turnout.core.events import EvalDone, EvalSkipped
from turnout.core.ports import Clock, EventSink
from turnout.core.rng import IdSource, random_id
from turnout.core.version import WeightVersion
from turnout.observe.metrics import EVAL_HIGH, EVAL_LOW, EVAL_SCORE
from turnout.observe.summary import wilson_interval
from turnout.placement.tasks import together
from turnout.rollout.evaluate import EvalMeans, EvalPoint, EvalSet, NoPoint, PassAt, Requests, evaluate
from turnout.schedule.phases import Phases
from turnout.serving.client import EngineClient
from turnout.serving.models import Models

PENDING_MAX = 32  # versions that wait for dedicated engines; more are not evaluated, and told
TRY_PAUSE_S = 1.0
TRIES_MAX = 3  # of a version on dedicated engines, which may end meanwhile
EVAL_SEEDS = (0, ("eval",))  # not the run's seed: runs are compared on the same noise
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvalPlan:
    """`sets` are scored before training, every `interval` steps (None: never between) and after the last;
    `before_only` sets once, before. The rest: the module's docstring."""

    sets: Sequence[EvalSet]
    before_only: Sequence[EvalSet]
    interval: int | None
    skip_before: bool
    mode: str = "shared"
    beside: bool = False
    hold_s: float = 60.0

    def due(self, step: int, before: int | None, last: bool) -> list[EvalSet]:
        """The sets to score on the version of a step; `before` is the step of the version before it, None for the
        first that there is."""
        first = step == 0 and not last
        every = self.interval
        crossed = every is not None and (
            step % every == 0 if before is None else step // every > before // every
        )
        if (first and self.skip_before) or not (first or last or crossed):
            return []
        return [*self.sets, *(self.before_only if first else ())]


class Dedicated(Protocol):
    """Engines that only evaluate (turnout.schedule.dedicated)."""

    async def serve(self, version: WeightVersion) -> None:
        """Returns when they serve the version; raises a TurnoutError where none does."""
        ...

    def routable(self) -> Sequence[EngineClient]: ...

    async def changed(self) -> None: ...


class Keeper(Protocol):
    """Who has the versions (turnout.weights.store)."""

    def keep(self, version: WeightVersion) -> None: ...

    def release(self, version: WeightVersion) -> None: ...


@dataclass(frozen=True)
class EvalWorld:
    """What evaluations need of the run; `dedicated` is there in that mode."""

    store: Keeper
    events: EventSink
    phases: Phases
    clock: Clock
    ids: IdSource = random_id
    dedicated: Dedicated | None = None


class EvalRuns:
    """Evaluations of the loop. `points` maps (set name, step of the version) to the point, in the order in which
    they were made; `kept` are versions to score after the run, with their steps and sets. `current` is the version
    that is committed, with the train steps done when it was exported."""

    def __init__(
        self,
        plan: EvalPlan,
        means: EvalMeans,
        world: EvalWorld,
        current: Callable[[], tuple[WeightVersion, int]],
    ) -> None:
        self._plan, self._means, self._world, self._current = plan, means, world, current
        self._task: asyncio.Task[None] | None = None
        self._begun: set[tuple[str, int]] = set()
        self._before: int | None = None
        self._since: int | None = None  # as `_before`, of the incarnation before
        self._older: asyncio.Task[None] | None = None
        self._step = 0  # of the newest task
        self._pending: dict[int, tuple[WeightVersion, list[EvalSet]]] = {}  # by step, on dedicated engines
        self.points: dict[tuple[str, int], EvalPoint] = {}
        self.kept: list[tuple[WeightVersion, int, list[EvalSet]]] = []
        self.seconds = 0.0

    def restore(self, done: Iterable[EvalDone], versions: Sequence[tuple[WeightVersion, int]] = ()) -> None:
        """On a resume: points that earlier incarnations made are not made again (their samples are gone).
        `versions` are those that were current before the one of the checkpoint, in order, with their steps: in the
        modes `checkpoint` and `dedicated` they are still to be scored where they were due."""
        for one in done:
            point = EvalPoint(
                name=one.name,
                version=one.version,
                score=one.score,
                items=one.items,
                failed=one.failed,
                samples=[],
                digest=one.digest,
                pass_at=tuple(PassAt(int(k), value, 0) for k, value in one.pass_at.items()),
            )
            self.points[one.name, one.step] = point
            self._begun.add((one.name, one.step))
        for version, step in versions:
            if self._plan.mode != "shared":
                self._begin_at(version, step, self._since, last=False)
            self._since = step

    async def run_if_due(self, steps_done: int, last: bool) -> None:
        """Called by the loop after each step's update, and before the first step. Returns when the points are made;
        `beside`, but for the last, when they have begun. Nothing is begun here while an update may be under way."""
        assert self._current()[1] <= steps_done, "weights are no newer than the train steps done"
        if last or self._before is None or not self._plan.beside:
            self._begin(last)
        if last or not self._plan.beside:
            with self._world.phases("evaluate") as phase:
                await self._ended()
            self.seconds += phase.seconds

    def renewed(self) -> None:
        """A version has been committed: what is due on it, and is made `beside`, begins now."""
        if self._plan.beside:
            self._begin(last=False)

    def _begin(self, last: bool) -> None:
        version, step = self._current()
        before = self._since if self._before is None else self._before
        self._before = step
        self._begin_at(version, step, before, last)

    def _begin_at(self, version: WeightVersion, step: int, before: int | None, last: bool) -> None:
        due = self._plan.due(step, before, last)
        sets = [data for data in due if (data.name, step) not in self._begun]
        self._begun |= {(data.name, step) for data in sets}
        if not sets:
            return
        if self._plan.mode == "dedicated":
            self._begin_apart(version, step, sets)
            return
        if self._plan.mode == "checkpoint":
            self._world.store.keep(version)
            self.kept.append((version, step, sets))
            return
        older, self._means = self._task, replace(self._means, requests=Requests())
        self._older, self._step = older, step
        self._means.requests.expect(sum(data.requests for data in sets))
        self._task = asyncio.ensure_future(self._score(sets, version.label, step, older))

    def _begin_apart(self, version: WeightVersion, step: int, sets: list[EvalSet]) -> None:
        if len(self._pending) == PENDING_MAX:
            self._skip(version, step, sets, f"{PENDING_MAX} versions wait for the engines of --eval-model")
            return
        self._world.store.keep(version)
        self._pending[step] = version, sets
        self._task = asyncio.ensure_future(self._score_apart(step, self._task))

    async def settled(self) -> None:
        """Returns when no request of an evaluation is with the run's engines, after `hold_s` seconds at the latest;
        raises what ended an evaluation."""
        await self._means.requests.idle(self._world.clock, self._plan.hold_s)
        if self._task is not None and self._task.done():
            self._task.result()

    async def caught_up(self, steps_done: int) -> None:
        """Returns when the points of earlier versions are made: a resume from here makes that of its own only.
        Their requests have ended by now, or there would be no newer version. Other modes than `shared` wait for
        nothing: a resume makes what is still missing."""
        if self._plan.mode != "shared":
            return
        task = self._task if self._step < steps_done else self._older
        if task is not None:
            await task

    async def close(self) -> None:
        """The run ends: what is under way is given up."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def clock(self) -> Clock:
        return self._world.clock

    @property
    def models(self) -> Models:
        """What rewards may ask."""
        return self._means.rewards.models

    @property
    def first_set(self) -> str:
        """The name of the set that the panel shows; empty where there is none."""
        return self._plan.sets[0].name if self._plan.sets else ""

    def curve(self) -> tuple[tuple[int, float], ...]:
        """(step, score) of the first set."""
        return tuple((step, p.score) for (name, step), p in self.points.items() if name == self.first_set)

    def rows(self) -> list[tuple[int, dict[str, float]]]:
        """The points as metrics, in the order made; the score of the first set stands under EVAL_SCORE as well."""
        return [
            (step, point_metrics(point, name == self.first_set))
            for (name, step), point in self.points.items()
        ]

    def first_and_last(self, name: str) -> tuple[EvalPoint | None, EvalPoint | None]:
        """The point before training and the newest one of a set; None where there is none."""
        steps = [step for found, step in self.points if found == name]
        before = self.points.get((name, 0))
        return before, self.points[name, max(steps)] if steps and max(steps) > 0 else None

    async def _ended(self) -> None:
        task, self._task = self._task, None
        if task is None:
            return
        if self._plan.mode != "dedicated":
            await task
            return
        try:
            await self._world.clock.within(self._plan.hold_s, "evaluations that are pending", task)
        except DeadlineExceeded:
            why = f"it was not made within {self._plan.hold_s:g} s of the run's end (--eval-hold)"
            for step, (version, sets) in self._pending.items():
                self._skip(version, step, sets, why)

    async def _score_apart(self, step: int, older: asyncio.Task[None] | None) -> None:
        """The points of a pending version, once those of older ones are made."""
        if older is not None:
            await older
        version, sets = self._pending[step]
        made: list[EvalPoint | NoPoint] = []
        for left in range(TRIES_MAX - 1, -1, -1):
            made = await self._made_apart(version, sets)
            if not any(isinstance(one, NoPoint) for one in made):
                break
            if left:  # who watches an engine may not have told of its death yet
                await self._world.clock.sleep(TRY_PAUSE_S)
        del self._pending[step]
        self._world.store.release(version)
        for one in made:
            self.add(one, step)

    async def _made_apart(self, version: WeightVersion, sets: list[EvalSet]) -> list[EvalPoint | NoPoint]:
        assert self._world.dedicated is not None, "mode dedicated has engines for it"
        means = replace(self._means, requests=Requests())
        means.requests.expect(sum(data.requests for data in sets))
        try:
            await self._world.dedicated.serve(version)
            return await together(evaluate(means, data, version.label) for data in sets)
        except TurnoutError as fault:  # of engines that the run can do without
            return [NoPoint(data.name, version.label, str(fault)) for data in sets]

    def _skip(self, version: WeightVersion, step: int, sets: Iterable[EvalSet], why: str) -> None:
        for data in sets:
            self.add(NoPoint(data.name, version.label, why), step)

    async def _score(
        self, sets: Sequence[EvalSet], label: str, step: int, older: asyncio.Task[None] | None
    ) -> None:
        if older is not None:  # its requests are done, its rewards may not be
            await older
        for made in await together(evaluate(self._means, data, label) for data in sets):
            self.add(made, step)

    def add(self, made: EvalPoint | NoPoint, step: int) -> None:
        """A point, or why there is none, at the step of its version."""
        if isinstance(made, NoPoint):
            self._world.events.emit(EvalSkipped(made.name, made.version, step, made.reason))
            log.warning("evaluation %s at step %d is not written: %s", made.name, step, made.reason)
            return
        self.points[made.name, step] = made
        ks = {str(one.k): one.value for one in made.pass_at}
        scored = made.score, made.items, made.failed, made.digest, ks
        self._world.events.emit(EvalDone(made.name, made.version, step, *scored))
        if made.failed:
            log.warning("evaluation %s at step %d: %d samples have no score", made.name, step, made.failed)


def point_metrics(point: EvalPoint, first: bool) -> dict[str, float]:
    """The numbers of a point by their keys in metrics.jsonl."""
    place = f"eval/{point.name.replace(', ', '_')}"
    row = {f"{place}/score": point.score, f"{place}/failed": float(point.failed)}
    row |= {f"{place}/pass@{one.k}": one.value for one in point.pass_at}
    low, high = point_interval(point)
    return row | ({EVAL_SCORE: point.score, EVAL_LOW: low, EVAL_HIGH: high} if first else {})


def point_interval(point: EvalPoint) -> tuple[float, float]:
    """The 95 % interval of its score, as that of a share."""
    return wilson_interval(min(max(point.score, 0.0), 1.0) * point.items, point.items)
