"""Reference log-probs from a frozen model's engines (--ref-model), in place of a copy in the trainer.

Promises: every response token of a sample that trains has the reference's log-prob, given prompt and response so
far, before the trainer sees the batch; an engine that ends meanwhile is asked no more, and its samples go to
another, or to its next life, until the deadline.
"""

from __future__ import annotations

import asyncio
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

    async def scored(self, batch: TrainBatch) -> TrainBatch:
        """The batch with `reference` set where a token trains. Raises EngineError, DeadlineExceeded."""
        gate = asyncio.Semaphore(CONCURRENCY)

        async def one(sample: TrainSample) -> TrainSample:
            if not any(sample.loss_mask):
                return sample
            what = f"the log-probs of a sample by the model {self.name!r}"
            async with gate:
                found = await self.clock.within(self.deadline_s, what, self._asked(sample))
            return but(sample, reference=found)

        return but(batch, samples=tuple(await together(map(one, batch.samples))))

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
        return await self._trainer.train(await self._reference.scored(batch))
