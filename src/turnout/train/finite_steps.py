"""Optimizer steps that are taken only where loss and gradient are finite.

Promises: a step that is left out changes nothing and is counted; more than `limit` in a row raise TrainError.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Protocol

from turnout.core.errors import TrainError
from turnout.train.lr_schedule import learning_rate
from turnout.train.settings import OptimizerSettings

log = logging.getLogger(__name__)


class Optimizer(Protocol):
    """The parameters' gradients and their update, over all ranks that hold a part of them."""

    @property
    def steps(self) -> int:
        """Applied so far, over all resumes."""
        ...

    @steps.setter
    def steps(self, count: int) -> None: ...

    def gradient_norm(self) -> float:
        """Global L2 norm of the collected gradients, the same on all ranks; NaN or infinite where a gradient is."""
        ...

    def step(self, lr: float, norm: float) -> None:
        """Clips by `norm`, steps, discards the gradients."""
        ...

    def discard(self) -> None:
        """Drops the gradients collected so far."""
        ...


@dataclass(frozen=True)
class Stepped:
    """The gradient's norm before clipping, the learning rate (0 where the step was left out)."""

    norm: float
    lr: float
    applied: bool


class FiniteSteps:
    """Steps of one optimizer, of the model that `what` names. `in_a_row` steps were left out just now."""

    def __init__(self, optimizer: Optimizer, settings: OptimizerSettings, limit: int, what: str) -> None:
        self._optimizer, self._settings, self._limit, self._what = optimizer, settings, limit, what
        self.in_a_row = 0

    def counts(self) -> tuple[int, int]:
        """Steps applied, and those left out in a row: what a checkpoint keeps of this."""
        return self._optimizer.steps, self.in_a_row

    def restore(self, applied: int, in_a_row: int) -> None:
        self._optimizer.steps, self.in_a_row = applied, in_a_row

    def apply(self, loss: float) -> Stepped:
        """One step on the gradients collected, whose loss is `loss`."""
        optimizer = self._optimizer
        norm = optimizer.gradient_norm()
        if math.isfinite(loss) and math.isfinite(norm):
            lr = learning_rate(self._settings, optimizer.steps)
            optimizer.step(lr, norm)
            self.in_a_row = 0
            return Stepped(norm, lr, applied=True)
        optimizer.discard()
        self.in_a_row += 1
        log.warning("%s: loss %s, gradient norm %s: the optimizer step is skipped", self._what, loss, norm)
        if self.in_a_row > self._limit:
            raise TrainError(
                f"{self._what}: {self._limit + 1} optimizer steps in a row had a non-finite loss or gradient "
                f"(last: loss {loss}, norm {norm}); --max-nonfinite-steps is {self._limit}"
            )
        return Stepped(norm, 0.0, applied=False)
