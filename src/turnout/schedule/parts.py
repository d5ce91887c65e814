"""The loop's parts, made of the layers below. Each owns one thing and knows neither the loop nor the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from turnout.core.ports import Clock
from turnout.core.types import TrainBatch
from turnout.rollout.book import GroupBook
from turnout.rollout.pool import RolloutPool
from turnout.schedule.loop import StepBatch
from turnout.train.advantages import build_samples
from turnout.train.backend import StepReport, TrainBackend, make_backend
from turnout.train.settings import TrainerSettings
from turnout.transfer.updater import Update, Updater
from turnout.weights.tensors import HostTensor

T = TypeVar("T")


class BatchMaker:
    """Rollouts of the loop: takes groups, turns them into a TrainBatch, ends them in the book."""

    def __init__(self, pool: RolloutPool, book: GroupBook, normalize_std: bool) -> None:
        self._pool, self._book, self._normalize_std = pool, book, normalize_std

    async def take(self, step: int) -> StepBatch | None:
        got = await self._pool.take(self._pool.plan.per_step)
        self._pool.end_step()
        if not got.groups:
            return None
        self._book.take(step, got.groups)
        samples = build_samples(got.groups, self._normalize_std)
        versions = sorted(
            {label for group in got.groups for t in group.trajectories for label in t.spans.labels}
        )
        train = TrainBatch(step, versions[0] if versions else "", samples)
        return StepBatch(step, got.groups, train, got.failed, got.filtered, got.short, got.last)

    def trained(self, batch: StepBatch, lags: dict[str, int]) -> None:
        with self._book.transaction():
            for group in batch.groups:
                self._book.train(group, batch.step, lags[group.group_id])


class TrainerThread:
    """The trainer on a thread of its own, so that the control plane goes on while it computes. One call at a
    time, always on the same thread: a thread pool of the compute library belongs to one thread."""

    def __init__(self, clock: Clock, deadline_s: float) -> None:
        self._clock, self._deadline_s = clock, deadline_s
        self._thread = ThreadPoolExecutor(1, "trainer")
        self._backend: TrainBackend | None = None

    async def start(self, settings: TrainerSettings) -> None:
        self._backend = await self._run("the trainer to load", lambda: make_backend(settings))

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

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, what: str, work: Callable[[], T]) -> T:
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        return await self._clock.within(self._deadline_s, what, future)


class WeightUpdates:
    """Weights of the loop: the trainer's export on the way through the updater."""

    def __init__(
        self, updater: Updater, export: Callable[[], Iterable[HostTensor]], deadline_s: float
    ) -> None:
        self.updater, self._export, self._deadline_s = updater, export, deadline_s

    @property
    def detached(self) -> bool:
        return self.updater.transport.detached

    def begin(self, train_step: int) -> Update:
        return self.updater.begin(self._export, train_step, self._deadline_s)
