"""THE main loop, of every schedule.

    source --> workers --> completed buffer --> batch --> trainer --> weight update
       ^                                                                   |
       +--------------------------- slots freed ---------------------------+

Worker loop (turnout.rollout.pool)
    consumes      prompts of the source, groups that were cut or sent back
    waits for     a free slot
    produces      completed groups
    unblocked by  the commit of a version, a dropped group

Train loop (here)
    consumes      completed groups
    waits for     the oldest groups of a step to be complete; the trainer
    produces      train steps, weight versions, checkpoints, evaluation points
    unblocked by  the last group's reward; the trainer's thread

Update loop (turnout.schedule.updates)
    consumes      published versions
    waits for     requests in flight where the schedule drains; the attestation of every required engine
    produces      the current version
    unblocked by  the last attestation

A version is current from its commit on, and by nothing else; the commit of the version that was made from a group
frees the group's slot, and nothing but the end of a dropped group frees one earlier. The schedules differ in two
numbers (turnout.schedule.schedule): how many steps the slots let rollouts lead, and whether requests in flight are
waited for before the weights change.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from turnout.core.errors import NothingToTrain
from turnout.core.types import RolloutGroup, TrainBatch
from turnout.core.version import WeightVersion
from turnout.rollout.staleness import Tokens
from turnout.schedule.lag import LagGate
from turnout.schedule.phases import Phases


@dataclass(frozen=True)
class StepBatch:
    """The groups of one step and what the trainer gets of them. `short` says why there are fewer groups than
    asked (empty: there are not), `last` that no prompt is left. `trained` counts the tokens that carry loss by
    group and version, `lags` by lag, `masked` those that --staleness-policy took out of it; `evicted` groups were
    too old for the batch."""

    step: int
    groups: list[RolloutGroup]
    train: TrainBatch
    failed: int
    filtered: int
    short: str
    last: bool
    trained: dict[str, Tokens]
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


class Updates(Protocol):
    async def publish(self, steps_done: int, last: bool) -> WeightVersion:
        """Publishes where that is due; the version that is current then."""
        ...

    async def settled(self) -> None:
        """Nothing is on its way to the engines any more."""
        ...


class Checkpoints(Protocol):
    def due(self, steps_done: int, last: bool) -> bool: ...

    async def save_if_due(self, steps_done: int, last: bool) -> None: ...


class Evaluations(Protocol):
    async def run_if_due(self, steps_done: int, last: bool) -> None: ...

    async def caught_up(self, steps_done: int) -> None:
        """The points of versions before this step are made."""
        ...


class Reporter(Protocol):
    def step(self, batch: StepBatch, metrics: dict[str, float], version: WeightVersion) -> None: ...


@dataclass(frozen=True)
class Parts:
    """What the loop drives. Parts don't know the loop, nor each other."""

    rollouts: Rollouts
    trainer: Trainer
    updates: Updates
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
        batch = await _taken(parts, step, first)
        if batch is None:  # the last prompts were all dropped: the step before was the last
            if step > first:
                await parts.updates.publish(step, last=True)
                await _keep(parts, step, last=True)
                await parts.evaluations.run_if_due(step, last=True)
            break
        lags = parts.gate.check(batch.trained, step)
        with parts.phases("train"):
            metrics = await parts.trainer.train(batch.train)
        parts.rollouts.trained(batch, lags)
        step += 1
        last = batch.last or step == end
        version = await parts.updates.publish(step, last)
        parts.reporter.step(batch, metrics, version)  # before the checkpoint: what that has done is told
        await _keep(parts, step, last)
        await parts.evaluations.run_if_due(step, last)
        if last:
            break
    return step


async def _taken(parts: Parts, step: int, first: int) -> StepBatch | None:
    """The next batch; where none can be made of what is sampled, a checkpoint of what was trained goes before."""
    try:
        with parts.phases("rollout"):
            return await parts.rollouts.take(step)
    except NothingToTrain:
        if step > first:
            await parts.updates.publish(step, last=True)
            await _keep(parts, step, last=True)
        raise


async def _keep(parts: Parts, step: int, last: bool) -> None:
    """A checkpoint where one is due. Its version is the one of its step: nothing is on the way then."""
    if parts.checkpoints.due(step, last):
        await parts.updates.settled()
        await parts.evaluations.caught_up(step)
        with parts.phases("checkpoint"):
            await parts.checkpoints.save_if_due(step, last)
