"""PPO's critic in the trainer: values of a batch, the advantages that follow from them, its own train step.

A train step asks it once: values of all states before it, GAE (turnout.train.gae) of every response on them, then
its own optimizer steps towards the returns, over the same slices of the batch as the policy's. The policy trains on
the advantages after that. Promises: it shares no memory with the policy; neither the packing nor the size of a
micro-batch nor the number of ranks changes its gradient beyond rounding; every rank tells the same; a step whose
loss or gradient is not finite changes nothing and is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from turnout.core.types import TrainSample, but
from turnout.train.advantages import normalized
from turnout.train.backend import CriticReport
from turnout.train.balance import OneProcess, World
from turnout.train.finite_steps import FiniteSteps, Optimizer
from turnout.train.gae import Doubles, gae
from turnout.train.losses.value import value_loss
from turnout.train.losses.weights import token_weights
from turnout.train.model import DeviceRows
from turnout.train.packing import MicroBatch
from turnout.train.rows import Floats, gather_tokens, of_all, plan_of, rows_of, scatter_tokens
from turnout.train.settings import CriticSettings, TrainerSettings


class Values(Protocol):
    """A model of values, over one process or several."""

    @property
    def device(self) -> torch.device: ...

    def values(self, rows: DeviceRows) -> Tensor:
        """fp32 [M]: the value of the state before each of the head's tokens."""
        ...


@dataclass(frozen=True)
class CriticParts:
    """What a backend makes a critic of: its model, the update of that, the ranks together."""

    model: Values
    optimizer: Optimizer
    world: World = field(default_factory=OneProcess)


@dataclass(frozen=True)
class Estimates:
    """Of every sample, by response token: the value before the train step, the return, the advantage; 0 where a
    token is masked."""

    values: list[Floats]
    returns: list[Floats]
    advantages: list[Doubles]


@dataclass
class _Tally:
    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    lr: float = 0.0
    clipped: float = 0.0
    skipped: int = 0


class Critic:
    """See the module. One train step at a time, on the thread of the trainer that owns it."""

    def __init__(
        self, settings: TrainerSettings, how: CriticSettings, parts: CriticParts, now: Callable[[], float]
    ) -> None:
        self._settings, self._how, self._now = settings, how, now
        self.model, self.optimizer, self._world = parts.model, parts.optimizer, parts.world
        self.steps = FiniteSteps(self.optimizer, how.optimizer, settings.max_nonfinite_steps, "the critic")

    def step(
        self, samples: Sequence[TrainSample], rewards: Sequence[Doubles]
    ) -> tuple[list[TrainSample], CriticReport]:
        """The samples with their advantages, and what the critic's train step came to. `rewards` has one number per
        response token of each sample; each sample has a token that trains. Raises TrainError after too many
        non-finite steps in a row."""
        started, tally = self._now(), _Tally()
        found = self.estimates(samples, rewards)
        advantages = found.advantages
        if self._settings.advantage.normalize:
            advantages = normalized(advantages, [np.asarray(s.loss_mask, bool) for s in samples])
        size = self._settings.samples_per_optimizer_step or len(samples)
        for first in range(0, len(samples), size):
            self._optimizer_step(samples, found, range(first, min(first + size, len(samples))), tally)
        advised = [but(sample, advantages=tuple(one.tolist())) for sample, one in zip(samples, advantages)]
        return advised, self._report(samples, found, tally, self._now() - started)

    def estimates(self, samples: Sequence[TrainSample], rewards: Sequence[Doubles]) -> Estimates:
        """Values, returns and advantages under the critic as it is."""
        values = self.values(samples)
        returns = [np.zeros_like(v) for v in values]
        advantages = [np.zeros(len(v)) for v in values]
        for index, sample in enumerate(samples):
            trained = np.flatnonzero(sample.loss_mask)
            of_tokens = values[index][trained].astype(np.float64)
            made = gae(rewards[index][trained], of_tokens, self._settings.advantage.gamma, self._how.lambd)
            advantages[index][trained], returns[index][trained] = made
        return Estimates(values, returns, advantages)

    @torch.no_grad()
    def values(self, samples: Sequence[TrainSample]) -> list[Floats]:
        """The value of the state before each token that trains, 0 at the others."""
        out = [np.zeros(len(s.response_ids), np.float32) for s in samples]
        for micro in self._plan(samples, range(len(samples))):
            rows = rows_of(micro, samples, masked_too=False)
            found = self.model.values(DeviceRows.of(rows, self.model.device))
            scatter_tokens(rows, found.cpu().numpy(), out)
        return of_all(out, self._world)

    def _plan(self, samples: Sequence[TrainSample], chosen: range) -> tuple[MicroBatch, ...]:
        return plan_of(samples, chosen, self._settings.max_tokens_per_micro_batch, self._world)

    def _optimizer_step(
        self, samples: Sequence[TrainSample], found: Estimates, chosen: range, tally: _Tally
    ) -> None:
        self.optimizer.discard()
        counts = [np.zeros(len(s.response_ids), np.float32) for s in samples]
        how = self._settings.loss.aggregate
        how = "token" if how == "constant" else how  # its loss is a mean in any case
        counts[chosen.start : chosen.stop] = token_weights([samples[i].loss_mask for i in chosen], how)
        loss = clips = 0.0
        for micro in self._plan(samples, chosen):
            rows = rows_of(micro, samples, masked_too=False)
            old, returns, weights = (
                torch.from_numpy(gather_tokens(rows, column)).to(self.model.device)
                for column in (found.values, found.returns, counts)
            )
            values = self.model.values(DeviceRows.of(rows, self.model.device))
            part, clipped = value_loss(values, old, returns, weights, self._how.value_clip)
            part.backward()
            loss += float(part.detach())
            clips += clipped
        loss, clips = self._world.sum(np.array([loss, clips])).tolist()
        tally.clipped += clips
        done = self.steps.apply(loss)
        tally.losses.append(loss)
        tally.norms.append(done.norm)
        if done.applied:
            tally.lr = done.lr
        else:
            tally.skipped += 1

    def _report(
        self, samples: Sequence[TrainSample], found: Estimates, tally: _Tally, seconds: float
    ) -> CriticReport:
        trained = np.concatenate([np.asarray(s.loss_mask) for s in samples]) > 0
        values = np.concatenate(found.values)[trained].astype(np.float64)
        returns = np.concatenate(found.returns)[trained].astype(np.float64)
        spread = float(returns.var())
        return CriticReport(
            value_loss=float(np.mean(tally.losses)),
            value_clip_fraction=tally.clipped / len(values),
            value_mean=float(values.mean()),
            return_mean=float(returns.mean()),
            explained_variance=1.0 - float((returns - values).var()) / spread if spread else 0.0,
            value_grad_norm=float(np.mean(tally.norms)),
            value_lr=tally.lr,
            value_skipped_nonfinite=tally.skipped,
            seconds_critic=seconds,
        )
