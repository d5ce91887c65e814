"""A train step from batch to report, whoever holds the parameters: one process or several ranks.

A train step is one optimizer step, or several over consecutive slices of the batch. Old log-probs are those
of the same forward pass when there is one step, else of a forward of their own before the first; a KL in the reward
has that forward too.

Promises: an optimizer step whose loss or gradient norm is not finite changes nothing and is counted; more
than `max_nonfinite_steps` in a row raise TrainError. Neither packing nor the number of ranks changes results beyond
rounding: weights of tokens are those of the whole batch, and every decision is taken on sums over all ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch

from turnout.core.errors import TrainError
from turnout.core.types import TrainBatch, TrainSample, but
from turnout.train.backend import CriticReport, StepReport
from turnout.train.balance import OneProcess, Wide, World
from turnout.train.checkpoint import Counters
from turnout.train.critic import Critic
from turnout.train.expert_balance import ExpertBalance
from turnout.train.expert_load import ExpertLoad, load_max, unused_share
from turnout.train.finite_steps import FiniteSteps, Optimizer
from turnout.train.gae import terminal_rewards
from turnout.train.losses.inputs import LossInputs, TokenSums
from turnout.train.losses.table import loss_of
from turnout.train.losses.weights import token_weights
from turnout.train.model import DTYPES, CausalModel, DeviceRows
from turnout.train.packing import MicroBatch
from turnout.train.products import products
from turnout.train.replay import RoutingReplay, shares
from turnout.train.reward_kl import reward_costs, with_costs
from turnout.train.rows import Floats, Rows, gather_tokens, of_all, plan_of, rows_of, scatter_tokens
from turnout.train.settings import TrainerSettings
from turnout.train.taught import taught

log = logging.getLogger(__name__)


@dataclass
class Tally:
    """What the optimizer steps of one train step add up to."""

    sums: TokenSums = field(default_factory=TokenSums)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    lr: float = 0.0
    rows: int = 0
    micro_batches: int = 0
    applied: int = 0
    skipped: int = 0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    critic: CriticReport | None = None
    experts: Wide = field(default_factory=lambda: np.zeros((0, 0)))  # tokens by layer and expert
    routed: Wide = field(default_factory=lambda: np.zeros(3))  # as RoutingReplay.take
    balance: float = 0.0  # as ExpertBalance.of


@dataclass(frozen=True)
class Slice:
    """The samples of one optimizer step with their per-token inputs, one array per sample. `plan` holds the
    samples that have a gradient, `measured` those whose gradient is exactly zero: forward only."""

    samples: Sequence[TrainSample]
    old: Sequence[Floats] | None
    weights: Sequence[Floats]
    plan: tuple[MicroBatch, ...]
    measured: tuple[MicroBatch, ...]


@dataclass(frozen=True)
class Parts:
    """What a backend is made of: the policy, its update, a frozen reference or None, the ranks together, a critic
    where there is one."""

    model: CausalModel
    optimizer: Optimizer
    reference: CausalModel | None = None
    world: World = field(default_factory=OneProcess)
    critic: Critic | None = None


class TrainStep:
    """What LocalBackend and ShardedBackend have in common; they add export, save and load."""

    def __init__(self, settings: TrainerSettings, parts: Parts, now: Callable[[], float]) -> None:
        self.settings = settings
        self._now = now
        self._loss = loss_of(settings.loss)
        self._model = parts.model
        self._optimizer = parts.optimizer
        self._replay = RoutingReplay(parts.model.module)
        self._load = ExpertLoad(parts.model.module)
        self._balance = ExpertBalance(parts.model.module, settings.loss.balance_coef)
        self._reference = parts.reference
        self._world = parts.world
        self._critic = parts.critic
        self._steps = FiniteSteps(
            parts.optimizer, settings.optimizer, settings.max_nonfinite_steps, "the policy"
        )
        self._steps_done = 0
        self._before: tuple[int, int, int, int] | None = None  # the tallies before the train step under way
        self._low_ess_in_a_row = 0

    def _products(self) -> AbstractContextManager[object]:
        return products(self._model.device, DTYPES[self.settings.dtype])

    @property
    def steps_done(self) -> int:
        return self._steps_done

    def train(self, batch: TrainBatch) -> StepReport:
        with self._products():
            return self._train(batch)

    def _train(self, batch: TrainBatch) -> StepReport:
        started, self._before = self._now(), self._tallies
        samples = [s for s in batch.samples if any(s.loss_mask)]
        tally = Tally()
        old: list[Floats] = []
        if samples:
            old = self._old(samples, tally)
            samples = self._advised(batch, samples, old, tally)
        if not samples:
            log.warning("step %d: no token of the batch may train; no optimizer step", batch.step)
        elif self._policy_trains:
            for part in self._slices(samples, old):
                self._optimizer_step(part, tally)
            tally.experts, tally.routed = self._load.take(), self._replay.take()
        self._gather(tally)
        if not self._policy_trains:
            tally.sums = TokenSums(tokens=sum(sum(s.loss_mask) for s in samples))
        self._steps_done += 1
        self._before = None
        self._check_ess(batch.step, tally.sums.effective_sample_share)
        return self._report(batch, len(samples), tally, self._now() - started)

    @property
    def _policy_trains(self) -> bool:
        critic = self.settings.critic
        return critic is None or self._steps_done >= critic.only_steps

    def _gather(self, tally: Tally) -> None:
        """Sums over the ranks; what follows from them is the same on each."""
        names, values = zip(*vars(tally.sums).items())
        row = np.array([*values, tally.balance, tally.rows, tally.micro_batches], np.float64)
        total, peak = self._world.sum(row), self._world.max(row)
        gathered = [p if n.endswith("_max") else t for n, t, p in zip(names, total.tolist(), peak.tolist())]
        tally.sums = TokenSums(*gathered)
        tally.balance, tally.rows, tally.micro_batches = float(total[-3]), int(total[-2]), int(total[-1])
        if tally.experts.size:
            tally.experts, tally.routed = self._world.sum(tally.experts), self._world.sum(tally.routed)

    def _check_ess(self, step: int, share: float) -> None:
        """Warns of a train step with few effective samples; raises TrainError after too many in a row."""
        off = self.settings.loss.off_policy
        if share >= off.min_ess:
            self._low_ess_in_a_row = 0
            return
        self._low_ess_in_a_row += 1
        what = f"step {step}: the effective sample size is {share:.3f} of the samples, --min-ess is {off.min_ess:g}"
        log.warning("%s", what)
        if self._low_ess_in_a_row > off.max_low_steps:
            raise TrainError(
                f"{what}, for {self._low_ess_in_a_row} steps in a row (--max-low-ess-steps {off.max_low_steps}): "
                "the samples come from too different policies; lower --max-staleness or --lr"
            )

    def _old(self, samples: list[TrainSample], tally: Tally) -> list[Floats]:
        """Log-probs under the weights before the step, by a forward of their own; empty where none is needed."""
        several = len(samples) > (self.settings.samples_per_optimizer_step or len(samples))
        compared = several and self._loss.old and not self.settings.loss.off_policy.interpolates
        if not compared and not self.settings.advantage.kl_coef:
            return []
        started = self._now()
        old = self.logprobs(samples)
        tally.forward += self._now() - started
        return old

    def _advised(
        self, batch: TrainBatch, samples: list[TrainSample], old: list[Floats], tally: Tally
    ) -> list[TrainSample]:
        """The samples with the advantages that only the trainer can tell: of a critic, of a KL in the reward, with
        the pull to a teacher."""
        how, costs = self.settings.advantage, [np.zeros(len(s.response_ids)) for s in samples]
        if how.kl_coef:
            started = self._now()
            if self._reference is not None:
                found = self._logprobs_of(self._reference, samples)
                samples = [but(s, reference=tuple(r.tolist())) for s, r in zip(samples, found)]
            costs = reward_costs(samples, old, how.kl_coef, self.settings.loss.kl_kind)
            tally.forward += self._now() - started
        if self._critic is not None:
            rewards = [terminal_rewards(s.reward, s.loss_mask) - cost for s, cost in zip(samples, costs)]
            samples, tally.critic = self._critic.step(samples, rewards)
        elif how.kl_coef:
            samples = with_costs(batch.samples, samples, costs, how)
        coef = self.settings.opd_kl_coef
        return taught(samples, coef) if coef else samples

    def _slices(self, samples: list[TrainSample], old: list[Floats]) -> list[Slice]:
        size = self.settings.samples_per_optimizer_step or len(samples)
        pieces = [samples[i : i + size] for i in range(0, len(samples), size)]
        loss = self.settings.loss
        all_train = loss.kl_coef > 0 or loss.entropy_coef > 0 or not self._loss.advantages
        all_train = all_train or self._balance.coef > 0
        live = [[i for i, s in enumerate(piece) if all_train or any(s.advantages)] for piece in pieces]
        return [
            Slice(
                piece,
                old[i * size : (i + 1) * size] if old and len(pieces) > 1 else None,
                token_weights([s.loss_mask for s in piece], loss.aggregate, loss.constant_length),
                self._plan(piece, chosen),
                self._plan(piece, sorted(set(range(len(piece))) - set(chosen))),
            )
            for i, (piece, chosen) in enumerate(zip(pieces, live))
        ]

    def _plan(self, samples: Sequence[TrainSample], chosen: Sequence[int]) -> tuple[MicroBatch, ...]:
        return plan_of(samples, chosen, self.settings.max_tokens_per_micro_batch, self._world)

    def _optimizer_step(self, part: Slice, tally: Tally) -> None:
        self._optimizer.discard()
        loss = 0.0
        jobs = [(micro, True) for micro in part.plan] + [(micro, False) for micro in part.measured]
        for micro, with_gradient in jobs:
            with torch.set_grad_enabled(with_gradient):
                loss += self._micro_step(part, micro, tally)
            tally.rows += micro.rows
            tally.micro_batches += bool(micro.units)
        started = self._now()
        loss = float(self._world.sum(np.array([loss]))[0])
        done = self._steps.apply(loss)
        tally.losses.append(loss)
        tally.norms.append(done.norm)
        if done.applied:
            tally.lr = done.lr
            tally.applied += 1
        else:
            tally.skipped += 1
        tally.optimizer += self._now() - started

    def _micro_step(self, part: Slice, micro: MicroBatch, tally: Tally) -> float:
        started = self._now()
        rows = rows_of(micro, part.samples, masked_too=False)
        device_rows = DeviceRows.of(rows, self._model.device)
        self._replay.use(rows.routed, self._model.device)
        self._balance.begin()
        logprobs, entropy = self._model.logprobs(device_rows)
        balance = self._balance.of(micro)
        self._replay.add()
        self._load.add(device_rows.head_rows)
        inputs = self._inputs(part, rows, device_rows)
        loss, sums = self._loss.function(logprobs, entropy, inputs, self.settings.loss)
        if self._balance.coef:
            loss = loss + self._balance.coef / len(part.samples) * balance
        value = float(loss.detach())
        tally.balance += float(balance.detach())
        between = self._now()
        if loss.requires_grad:
            loss.backward()
        tally.sums += sums
        tally.forward += between - started
        tally.backward += self._now() - between
        return value

    def _inputs(self, part: Slice, rows: Rows, device_rows: DeviceRows) -> LossInputs:
        def tokens(values: Sequence[Sequence[float] | Floats]) -> torch.Tensor:
            return torch.from_numpy(gather_tokens(rows, values)).to(self._model.device)

        reference = None
        if self.settings.reference_given or self.settings.advantage.kl_coef:
            reference = tokens([s.reference for s in part.samples])
        elif self._reference is not None:
            with torch.no_grad():
                reference = self._reference.logprobs(device_rows)[0]
        return LossInputs(
            behaviour=tokens([s.logprobs for s in part.samples]),
            advantages=tokens([s.advantages for s in part.samples]),
            weights=tokens(part.weights),
            sample=torch.from_numpy(rows.sample).to(self._model.device),
            lags=tokens([s.lags or (0,) * len(s.response_ids) for s in part.samples]),
            old=None if part.old is None else tokens(part.old),
            reference=reference,
        )

    def logprobs(self, samples: Sequence[TrainSample]) -> list[Floats]:
        with self._products():
            return self._logprobs_of(self._model, samples)

    @torch.no_grad()
    def _logprobs_of(self, model: CausalModel, samples: Sequence[TrainSample]) -> list[Floats]:
        out = [np.zeros(len(s.response_ids), np.float32) for s in samples]
        filled = [index for index, values in enumerate(out) if len(values)]
        kept = [samples[index] for index in filled]
        for micro in self._plan(kept, range(len(kept))):
            rows = rows_of(micro, kept, masked_too=True)
            if model is self._model:
                self._replay.use(rows.routed, model.device)
            values = model.logprobs(DeviceRows.of(rows, model.device))[0].cpu().numpy()
            scatter_tokens(rows, values, [out[index] for index in filled])
        return of_all(out, self._world)

    def _report(self, batch: TrainBatch, sequences: int, tally: Tally, seconds: float) -> StepReport:
        sums, (recorded, changed) = tally.sums, shares(tally.routed)
        return StepReport(
            step=batch.step,
            loss=float(np.mean(tally.losses)) if tally.losses else 0.0,
            grad_norm=float(np.mean(tally.norms)) if tally.norms else 0.0,
            lr=tally.lr,
            sequences=sequences,
            tokens=int(sums.tokens),
            rows=tally.rows,
            micro_batches=tally.micro_batches,
            optimizer_steps=tally.applied,
            skipped_nonfinite=tally.skipped,
            skipped_empty=int(sequences == 0),
            entropy=sums.mean("entropy"),
            clip_fraction=sums.mean("clipped"),
            ratio_mean=sums.mean("ratio"),
            approx_kl=sums.mean("approx_kl"),
            reference_kl=sums.mean("reference_kl"),
            effective_sample_share=sums.effective_sample_share,
            mismatch_mean=sums.mean("mismatch"),
            mismatch_max=sums.mismatch_max,
            mismatch_k3=sums.mean("mismatch_k3"),
            importance_mean=sums.mean("weight") if sums.tokens else 1.0,
            importance_max=sums.weight_max if sums.tokens else 1.0,
            importance_bounded_share=sums.mean("bounded"),
            expert_load_max=load_max(tally.experts),
            expert_unused_share=unused_share(tally.experts),
            expert_balance_loss=tally.balance / max(1, sequences * self._balance.layers),
            routing_recorded_share=recorded,
            routing_changed_share=changed,
            seconds_forward=tally.forward,
            seconds_backward=tally.backward,
            seconds_optimizer=tally.optimizer,
            seconds_total=seconds,
            critic=tally.critic,
        )

    @property
    def _tallies(self) -> tuple[int, int, int, int]:
        """Optimizer steps applied, and those left out in a row; both of the critic."""
        applied, skipped = self._steps.counts()
        critic_applied, critic_skipped = (0, 0) if self._critic is None else self._critic.steps.counts()
        return applied, skipped, critic_applied, critic_skipped

    @property
    def counters(self) -> Counters:
        """What a checkpoint keeps beside the tensors. Where a train step broke, those before it; raises TrainError
        where it had applied something."""
        now = self._tallies
        applied, skipped, critic_applied, critic_skipped = now if self._before is None else self._before
        if (now[0], now[2]) != (applied, critic_applied):
            raise TrainError("the trainer stands in the middle of a train step")
        low = self._low_ess_in_a_row
        return Counters(self._steps_done, applied, skipped, low, critic_applied, critic_skipped)

    @counters.setter
    def counters(self, counters: Counters) -> None:
        self._steps_done, self._before = counters.steps_done, None
        self._low_ess_in_a_row = counters.low_ess_in_a_row
        self._steps.restore(counters.optimizer_steps, counters.nonfinite_in_a_row)
        if self._critic is not None:
            self._critic.steps.restore(counters.critic_steps, counters.critic_nonfinite_in_a_row)


def prepare_torch(settings: TrainerSettings) -> None:
    """Sets thread count, seed and, where asked, deterministic algorithms, for the whole process."""
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    if settings.deterministic:  # cuBLAS reads it when the first CUDA context is made
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(settings.deterministic)
