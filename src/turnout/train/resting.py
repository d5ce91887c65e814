"""The train step of a trainer that may give its memory back between steps (--offload-train): in one process, or in
each rank by itself.

Promises: those of turnout.train.step and turnout.train.offload; no call here needs another rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from turnout.core.errors import InvariantBroken
from turnout.core.types import TrainBatch, TrainSample
from turnout.train.backend import GivenBack, StepReport
from turnout.train.offload import Offload, Trained
from turnout.train.rows import Floats
from turnout.train.step import TrainStep


class RestingStep(TrainStep):
    """Implements Offloading, for backends that say `may_rest` when they are made."""

    _offload: Offload | None = None

    def may_rest(self, models: Mapping[str, Trained], frozen: Sequence[Tensor]) -> None:
        """Makes room for the state where the settings ask for it; arguments and errors as of Offload."""
        if self.settings.offload is not None:
            self._offload = Offload(self.settings.offload, models, frozen)

    def train(self, batch: TrainBatch) -> StepReport:
        self._must_be_here()
        return super().train(batch)

    def logprobs(self, samples: Sequence[TrainSample]) -> list[Floats]:
        self._must_be_here()
        return super().logprobs(samples)

    def offload(self) -> GivenBack:
        return self._offloading().leave()

    def onload(self) -> None:
        self._offloading().come()

    def _offloading(self) -> Offload:
        if self._offload is None:
            raise InvariantBroken("this trainer was made to stay in memory")
        return self._offload

    def _must_be_here(self) -> None:
        if self._offload is not None and self._offload.away:
            raise InvariantBroken("a step needs the trainer's memory, which is given back")

    def _settle(self) -> None:
        """The kept state was read or replaced."""
        if self._offload is not None:
            self._offload.settle()
