"""The loop's parts, made of the layers below. Each owns one thing and knows neither the loop nor the others."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from turnout.core.errors import TrainerLost, TrainError, TurnoutError
from turnout.core.events import GroupTrained
from turnout.core.ports import Clock
from turnout.core.types import RolloutGroup, TrainBatch
from turnout.placement.call_threads import CallThreads
from turnout.placement.cluster import Cluster
from turnout.placement.stacks import threads_at
from turnout.rollout.book import GroupBook
from turnout.rollout.pool import RolloutPool
from turnout.rollout.pool_plan import NO_DATA, Taken
from turnout.rollout.staleness import NEVER, Fate, Verdict, trained_tokens
from turnout.schedule.lag import LagGate
from turnout.schedule.loop import StepBatch
from turnout.train.advantages import build_samples, without_truncated
from turnout.train.backend import StepReport, TrainBackend, make_backend
from turnout.train.rank_launch import RankPlan, Ranks, start_ranks
from turnout.train.settings import AdvantageSettings, TrainerSettings
from turnout.transfer.updater import Update, Updater
from turnout.weights.digest import root_of
from turnout.weights.tensors import HostTensor

POLL_S = 0.2
RANKS_SAY_S = 10.0  # from a deadline or a death until the ranks are known to blame
IDLE = "_serve <"  # a thread that waits for its next call (turnout.placement.call_threads)
NOT_FULL = "the last batch is not full"
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Freshness:
    """How old groups are told from those that may train. `settled` waits for the update under way, `failure` is why
    the last one failed, if it did; `retry` tries it again after so many train steps, or raises that."""

    gate: LagGate
    settled: Callable[[], Awaitable[None]]
    failure: Callable[[], TurnoutError | None]
    retry: Callable[[int], Awaitable[None]]


class BatchMaker:
    """Rollouts of the loop: takes groups, evicts those that are too old and takes as many more, turns the rest into
    a TrainBatch, ends them in the book."""

    def __init__(
        self,
        pool: RolloutPool,
        book: GroupBook,
        freshness: Freshness,
        advantage: AdvantageSettings,
        made: Callable[[StepBatch], None] = lambda _: None,
    ) -> None:
        """`made` is told of each batch."""
        self._pool, self._book, self._fresh, self._advantage = pool, book, freshness, advantage
        self._made = made

    async def take(self, step: int) -> StepBatch | None:
        kept: list[Verdict] = []
        evicted = 0
        while True:
            got = await self._taken(self._pool.plan.per_step - len(kept), step)
            young, lost = await self._judged(got.groups, step)
            evicted += len(lost)
            self._evict(lost, step, evicted)
            kept += young
            if not lost:
                break
        if got.short == NO_DATA and self._pool.plan.last_batch == "drop":
            for verdict in kept:
                self._pool.drop(verdict.group, NOT_FULL)
            log.warning("step %d: the last %d groups don't fill a batch: dropped", step, len(kept))
            kept = []
        self._pool.end_step()
        if not kept:
            return None
        batch = self._batch(step, kept, got, evicted)
        self._made(batch)
        return batch

    def _batch(self, step: int, kept: list[Verdict], got: Taken, evicted: int) -> StepBatch:
        groups = [verdict.group for verdict in kept]
        trained = {verdict.group.group_id: verdict.trained for verdict in kept}
        if self._advantage.mask_truncated:
            groups = [without_truncated(group) for group in groups]
            trained = {group.group_id: trained_tokens(group) for group in groups}
        self._book.take(step, groups)
        gate = self._fresh.gate
        samples = build_samples(groups, self._advantage, gate.lags(step))
        labels = {label for group in groups for t in group.trajectories for _, label in t.spans.runs}
        train = TrainBatch(step, min(labels, default=""), samples)
        lags, masked = gate.count(trained.values(), step), sum(verdict.masked for verdict in kept)
        numbers = (got.failed, got.filtered, got.short, got.last)
        return StepBatch(step, groups, train, *numbers, trained, lags, masked, evicted)

    async def _taken(self, count: int, step: int) -> Taken:
        """So many groups. Where none can come since the last update failed, and no slot is free, it is tried again:
        nobody trains now."""
        while True:
            try:
                return await self._pool.take(count)
            except TurnoutError as fault:
                if fault is not self._fresh.failure():
                    raise
            await self._fresh.retry(step)

    async def _judged(self, groups: list[RolloutGroup], step: int) -> tuple[list[Verdict], list[Verdict]]:
        """Verdicts on groups that stay and on those that go. Where one goes, or has tokens of a version that is not
        current, the update under way is waited for: such a version may be current then, and the groups that come in
        place of old ones are made by the newest weights."""
        gate = self._fresh.gate
        verdicts = gate.judge(groups, step)
        if any(verdict.evicted or verdict.lag >= NEVER for verdict in verdicts):
            await self._fresh.settled()
            verdicts = gate.judge(groups, step)
        return [v for v in verdicts if not v.evicted], [v for v in verdicts if v.evicted]

    def _evict(self, lost: list[Verdict], step: int, total: int) -> None:
        """Ends the groups. More in one step than there are slots means that even groups made now are too old."""
        if lost:
            with self._book.transaction():
                for verdict in lost:
                    if verdict.fate is Fate.REPLAY:
                        self._pool.send_back(verdict.group, verdict.reason)
                    else:
                        self._pool.drop(verdict.group, verdict.reason)
        if total > self._pool.plan.slots:
            failure = self._fresh.failure()
            if failure is not None:
                raise failure
            raise TrainError(
                f"step {step}: {total} groups were too old for it, and so are those made now "
                f"({lost[-1].reason}): no update brings newer weights"
            )

    def trained(self, batch: StepBatch, lags: dict[str, int]) -> None:
        """`lags`: the greatest of each group."""
        self._book.train(
            [
                GroupTrained(group_id, batch.step, sorted(tokens), lags[group_id])
                for group_id, tokens in batch.trained.items()
            ]
        )


class TrainerThread:
    """The trainer on a thread of its own, so that the control plane goes on while it computes. One call at a
    time, always on the same thread: a thread pool of the compute library belongs to one thread. A call past its
    deadline goes on there, holds up nobody's end, and leaves the trainer unusable. With `ranks` it computes in
    processes of their own, and the thread waits for them: they keep the deadline, and say more at its end."""

    def __init__(
        self, clock: Clock, deadline_s: float, ranks: RankPlan | None = None, cluster: Cluster | None = None
    ) -> None:
        """`cluster` has places for the ranks; None: they are children of this process."""
        self._clock, self._plan, self._cluster = clock, ranks, cluster
        self._deadline_s = deadline_s if ranks is None else deadline_s + RANKS_SAY_S
        self._ranks: Ranks | None = None
        self._thread = CallThreads("trainer")
        self._backend: TrainBackend | None = None
        self.doing: tuple[str, float] | None = None  # what, since when

    async def start(self, settings: TrainerSettings) -> None:
        if self._plan is not None:
            self._ranks = await start_ranks(self._plan, self._clock, self._cluster)
        ranks = self._ranks
        self._backend = await self._run("the trainer to load", lambda: make_backend(settings, ranks))

    def hold(self, backend: TrainBackend) -> None:
        """In place of `start`: this trainer."""
        self._backend = backend

    async def train(self, batch: TrainBatch) -> dict[str, float]:
        report: StepReport = await self._run("a train step", lambda: self.backend.train(batch))
        return report.metrics()

    async def call(self, what: str, work: Callable[[TrainBackend], T]) -> T:
        """Runs `work` on the trainer's thread; `what` names it in the error of its deadline."""
        return await self._run(what, lambda: work(self.backend))

    @property
    def backend(self) -> TrainBackend:
        if self._backend is None:
            raise RuntimeError("the trainer was not started")
        return self._backend

    def export(self) -> Iterable[HostTensor]:
        """The weights as they are; only between train steps."""
        return self.backend.export()

    async def digest(self) -> str:
        """The root digest of the weights as they are."""
        return await self.call("the weights to be digested", lambda trainer: root_of(trainer.export()))

    def places(self) -> list[str]:
        """What keeps the trainer: ranks that have not answered for a while; or where its thread is."""
        if self._ranks is None:
            return [at for at in threads_at("trainer") if IDLE not in at]
        return [self._ranks.standing(rank) for rank in self._ranks.places]

    @property
    def watches(self) -> list[Coroutine[Any, Any, None]]:
        """For the time the run goes on: ends with TrainerLost where a rank ends while nothing is asked of it, with
        what a call failed with where nobody waited for that call."""
        return [] if self._ranks is None else [self._lost(self._ranks)]

    async def _lost(self, ranks: Ranks) -> None:
        how = await ranks.ended()
        if ranks.busy or ranks.killed:
            await self._clock.sleep(RANKS_SAY_S)  # the call under way, or that failed, tells more
        raise ranks.cause or TrainerLost(f"the trainer failed between its calls: {how}")

    async def close(self) -> None:
        self._thread.close()
        if self._ranks is not None:
            await self._ranks.stop()

    async def _run(self, what: str, work: Callable[[], T]) -> T:
        if self._thread.left_behind:
            raise TrainError(f"no {what}: an earlier call of the trainer never came back")
        self.doing = what, self._clock.now()
        try:
            return await self._thread.within(self._clock, self._deadline_s, what, work)
        finally:
            self.doing = None


@dataclass(frozen=True)
class UpdatePatience:
    """How long one update may take, and how often one that failed is tried again: once enough of the engines that
    `up` names take part in updates, for which it waits at most `recovery_s`."""

    deadline_s: float
    retries: int = 0
    up: Callable[[], Iterable[str]] = tuple[str, ...]
    recovery_s: float = 0.0


class Exporter(Protocol):
    """The trainer, as far as updates need it."""

    def export(self) -> Iterable[HostTensor]: ...

    async def digest(self) -> str: ...


class WeightUpdates:
    """Weights of the loop: the trainer's export on the way through the updater."""

    def __init__(self, updater: Updater, trainer: Exporter, patience: UpdatePatience) -> None:
        self.updater, self._trainer, self._patience = updater, trainer, patience
        self.retries = patience.retries

    async def recovered(self) -> None:
        """Waits until enough engines run and take part in updates; raises DeadlineExceeded."""
        fleet, clock, up = self.updater.fleet, self.updater.clock, self._patience.up

        async def poll() -> None:
            while not fleet.enough(set(up()).intersection(fleet.required())):
                await clock.sleep(POLL_S)

        await clock.within(self._patience.recovery_s, f"{fleet.min_engines} engines to be up", poll())

    @property
    def follow(self) -> bool:
        return self.updater.policy.follow

    @property
    def detached(self) -> bool:
        return self.updater.transport.detached

    async def digest(self) -> str:
        return await self._trainer.digest()

    def begin(self, train_step: int) -> Update:
        return self.updater.begin(self._trainer.export, train_step, self._patience.deadline_s)
