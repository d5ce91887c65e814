"""THE main loop.

    source --> workers --> completed groups --> batch --> trainer --> weight update
       ^                                                                   |
       +---------------- the next rollout may start: slots freed ----------+

Train loop
    consumes      the completed groups of rollout k
    waits for     the rollout, the trainer, the attestation of every required engine
    produces      train steps, weight versions, checkpoints, evaluation points
    unblocked by  the last group's reward; the trainer's thread; the last attestation

A version is current from the return of `commit` on, and by nothing else. In `sync` the rollout of step k + 1
starts after that, so every token of a batch was made by the version that its step starts from, and what frees
the slots of a batch is the commit of the version that it made.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from turnout.core.types import RolloutGroup, TrainBatch
from turnout.core.version import WeightVersion
from turnout.schedule.lag import LagGate
from turnout.schedule.phases import Phases


@dataclass(frozen=True)
class StepBatch:
    """The groups of one step and what the trainer gets of them. `short` says why there are fewer groups than
    asked (empty: there are not), `last` that no prompt is left. `lags` counts the tokens that carry loss by lag,
    `masked` those that --staleness-policy took out of it; `evicted` groups were too old for the batch."""

    step: int
    groups: list[RolloutGroup]
    train: TrainBatch
    failed: int
    filtered: int
    short: str
    last: bool
    lags: Counter[int] = field(default_factory=Counter[int])
    masked: int = 0
    evicted: int = 0


class Rollouts(Protocol):
    async def take(self, step: int) -> StepBatch | None:
        """The next batch, oldest groups first; None where no prompt is left."""
        ...

    def trained(self, batch: StepBatch, lags: dict[str, int]) -> None:
        """The groups of the batch have ended."""
        ...


class Trainer(Protocol):
    async def train(self, batch: TrainBatch) -> dict[str, float]:
        """One train step; its metrics."""
        ...


class PendingUpdate(Protocol):
    async def publish(self) -> object: ...

    async def prepare(self) -> None: ...

    async def commit(self) -> WeightVersion: ...


class Weights(Protocol):
    def begin(self, train_step: int) -> PendingUpdate: ...


class Checkpoints(Protocol):
    async def save_if_due(self, steps_done: int, last: bool) -> None: ...


class Evaluations(Protocol):
    async def run_if_due(self, steps_done: int, last: bool) -> None: ...


class Reporter(Protocol):
    def step(self, batch: StepBatch, metrics: dict[str, float], version: WeightVersion) -> None: ...


@dataclass(frozen=True)
class Parts:
    """What the loop drives. Parts don't know the loop, nor each other."""

    rollouts: Rollouts
    trainer: Trainer
    weights: Weights
    checkpoints: Checkpoints
    evaluations: Evaluations
    reporter: Reporter
    gate: LagGate
    phases: Phases


async def run_loop(parts: Parts, first: int, end: int | None) -> int:
    """Train steps `first` to `end` (exclusive; None: until the data ends). Returns the steps done."""
    step = first
    await parts.evaluations.run_if_due(step, last=False)
    while end is None or step < end:
        with parts.phases("rollout"):
            batch = await parts.rollouts.take(step)
        if batch is None:  # the last prompts were all dropped: the step before was the last
            if step > first:
                await _end(parts, step)
            break
        lags = parts.gate.check(batch.groups, step)
        with parts.phases("train"):
            metrics = await parts.trainer.train(batch.train)
        parts.rollouts.trained(batch, lags)
        step += 1
        last = batch.last or step == end
        update = await _publish(parts, step)
        with parts.phases("activate"):
            version = await update.commit()
        parts.gate.committed(version, step)
        with parts.phases("checkpoint"):
            await parts.checkpoints.save_if_due(step, last)
        parts.reporter.step(batch, metrics, version)
        await parts.evaluations.run_if_due(step, last)
        if last:
            break
    return step


async def _publish(parts: Parts, step: int) -> PendingUpdate:
    """The version on its way to every engine; none of them has stopped serving the old one."""
    update = parts.weights.begin(step)
    with parts.phases("publish"):
        await update.publish()
    with parts.phases("prepare"):
        await update.prepare()
    return update


async def _end(parts: Parts, step: int) -> None:
    with parts.phases("checkpoint"):
        await parts.checkpoints.save_if_due(step, last=True)
    await parts.evaluations.run_if_due(step, last=True)
