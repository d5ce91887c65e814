"""Log-probs of a frozen model's engines: of a reference (--ref-model), in place of a copy in the trainer, and of a
teacher (--opd-teacher).

Promises: every response token of a sample that trains has the model's log-prob, given prompt and response so far,
before the trainer sees the batch; an engine that ends meanwhile is asked no more, and its samples go to another, or
to its next life, until the deadline.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from turnout.core.errors import EngineBusy, EngineDead
from turnout.core.ports import Clock
from turnout.core.types import TrainBatch, TrainSample, but
from turnout.placement.tasks import together
from turnout.schedule.loop import Trainer
from turnout.serving.models import Models

CONCURRENCY = 128  # samples that are with the engines at a time
PAUSE_S = 0.2


@dataclass(frozen=True)
class Reference:
    """The model `name` among `models`, asked for one sample within `deadline_s`."""

    models: Models
    name: str
    clock: Clock
    deadline_s: float

    async def logprobs(self, batch: TrainBatch) -> list[tuple[float, ...]]:
        """By sample, those of its response; of one without a token that trains none. Raises EngineError,
        DeadlineExceeded."""
        gate = asyncio.Semaphore(CONCURRENCY)

        async def one(sample: TrainSample) -> tuple[float, ...]:
            if not any(sample.loss_mask):
                return ()
            what = f"the log-probs of a sample by the model {self.name!r}"
            async with gate:
                return await self.clock.within(self.deadline_s, what, self._asked(sample))

        return await together(map(one, batch.samples))

    async def _asked(self, sample: TrainSample) -> tuple[float, ...]:
        ids, start = (*sample.prompt_ids, *sample.response_ids), len(sample.prompt_ids) - 1
        while True:
            try:
                return await self.models.engine(self.name).score(ids, start, self.deadline_s)
            except (EngineDead, EngineBusy):
                await self.clock.sleep(PAUSE_S)


class ReferencedTrainer:
    """The trainer of the loop, given batches with the reference's log-probs."""

    def __init__(self, trainer: Trainer, reference: Reference) -> None:
        self._trainer, self._reference = trainer, reference

    async def train(self, batch: TrainBatch) -> dict[str, float]:
        found = await self._reference.logprobs(batch)
        samples = [but(sample, reference=made) for sample, made in zip(batch.samples, found)]
        return await self._trainer.train(but(batch, samples=tuple(samples)))


class TaughtTrainer:
    """The trainer of the loop, given batches with the log-probs of a teacher. Its metrics have `opd_kl`, the mean
    of log pi - log pi_teacher over trained tokens, pi as the engines sampled them: the reverse KL's estimate."""

    def __init__(self, trainer: Trainer, teacher: Reference) -> None:
        self._trainer, self._teacher = trainer, teacher

    async def train(self, batch: TrainBatch) -> dict[str, float]:
        found = await self._teacher.logprobs(batch)
        samples = [but(sample, teacher=made) for sample, made in zip(batch.samples, found)]
        gaps = [
            mine - theirs
            for sample in samples
            for mine, theirs, trains in zip(sample.logprobs, sample.teacher, sample.loss_mask)
            if trains
        ]
        told = await self._trainer.train(but(batch, samples=tuple(samples)))
        return told | {"opd_kl": math.fsum(gaps) / len(gaps) if gaps else 0.0}
