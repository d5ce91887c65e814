"""What a trainer is told, as plain frozen values: no torch here, so that configuration can build them.

Promises: `faults` finds every contradiction at once; nothing else in `train` checks settings again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from turnout.core.errors import Fault


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and its schedule. `total_steps` and `warmup_steps` count optimizer steps; `clip_grad` is the
    global gradient norm above which gradients are scaled down (0: never)."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 1
    min_lr_ratio: float = 0.0


OFF_POLICY_BOUNDS = {
    "none": (0.0, math.inf),
    "tis": (0.0, 2.0),
    "mis": (0.5, 5.0),
    "sequence": (0.0, 2.0),
    "decoupled": (0.0, 5.0),
}


@dataclass(frozen=True)
class OffPolicy:
    """The correction for tokens of older policies (turnout.train.off_policy).

    `low` and `cap` bound the weights (None: as in OFF_POLICY_BOUNDS); `prox` is how the proximal policy of
    `decoupled` is found; `rollout_logprobs` clips the ratio to the engine's log-probs, not the trainer's own. A
    train step whose effective sample size, as a share of its tokens (of its sequences for `sequence`), is below
    `min_ess` is told; more than `max_low_steps` in a row end the run.
    """

    kind: Literal["none", "tis", "mis", "sequence", "decoupled"] = "none"
    low: float | None = None
    cap: float | None = None
    prox: Literal["recompute", "interpolate"] = "recompute"
    rollout_logprobs: bool = False
    min_ess: float = 0.0
    max_low_steps: int = 3

    @property
    def bounds(self) -> tuple[float, float]:
        low, cap = OFF_POLICY_BOUNDS[self.kind]
        return low if self.low is None else self.low, cap if self.cap is None else self.cap

    @property
    def interpolates(self) -> bool:
        return self.kind == "decoupled" and self.prox == "interpolate"


@dataclass(frozen=True)
class Overlong:
    """Responses that come within `buffer` tokens of `limit` lose up to `factor` of their reward."""

    limit: int
    buffer: int
    factor: float = 1.0


@dataclass(frozen=True)
class AdvantageSettings:
    """How rewards become advantages (turnout.train.advantages). `kl_coef` weighs the KL to the reference in the
    reward; `mask_truncated` leaves responses that were cut at their limit out of the loss, not out of baselines.
    `function` takes the baseline's place (turnout.train.own)."""

    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    std: bool = True
    normalize: bool = False
    gamma: float = 1.0
    kl_coef: float = 0.0
    overlong: Overlong | None = None
    mask_truncated: bool = False
    function: str | None = None


@dataclass(frozen=True)
class LossSettings:
    """The objective: `name` is one of turnout.train.losses.table. The ratio is clipped to [1 - eps_clip,
    1 + eps_clip_high]; `kl_coef` weighs the KL to the reference (0: measured where there is a reference, not
    trained on), times the ratio where `unbiased_kl`. `eps_clip_c` bounds the ratio of a token with a negative
    advantage; `opsm_delta` is the divergence above which a response with one is left out. None: neither.
    `aggregate` is as in turnout.train.losses.weights, `constant_length` the length that "constant" divides by.
    `balance_coef` weighs the balance of experts (turnout.train.expert_balance; 0: measured, None: not even that).
    `function` takes the surrogate's place (turnout.train.own)."""

    name: Literal["grpo", "gspo", "cispo", "sft"] = "grpo"
    eps_clip: float = 0.2
    eps_clip_high: float = 0.28
    eps_clip_c: float | None = None
    kl_coef: float = 0.0
    kl_kind: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    unbiased_kl: bool = False
    entropy_coef: float = 0.0
    balance_coef: float | None = None
    opsm_delta: float | None = None
    aggregate: Literal["token", "sample", "constant"] = "token"
    constant_length: int = 1
    function: str | None = None
    off_policy: OffPolicy = OffPolicy()


@dataclass(frozen=True)
class CriticSettings:
    """The value model of PPO: `checkpoint` is the HF folder of its layers, `optimizer` its own; `lambd` is that
    of turnout.train.gae, `value_clip` that of turnout.train.losses.value. In the first `only_steps` train
    steps the policy is left as it is."""

    checkpoint: Path
    optimizer: OptimizerSettings = OptimizerSettings()
    lambd: float = 1.0
    value_clip: float = 0.2
    only_steps: int = 0

    def rules(self) -> list[tuple[bool, str, object, str]]:
        """As in TrainerSettings.faults."""
        return [
            (0 <= self.lambd <= 1, "--lambd", self.lambd, "must be between 0 and 1"),
            (self.value_clip > 0, "--value-clip", self.value_clip, "must be above 0"),
            (self.only_steps >= 0, "--num-critic-only-steps", self.only_steps, "must be 0 or more"),
            (self.optimizer.lr >= 0, "--critic-lr", self.optimizer.lr, "must be 0 or more"),
        ]


@dataclass(frozen=True)
class TrainerSettings:
    """One trainer process. `checkpoint` and `reference` are HF folders; lengths are in tokens.

    `samples_per_optimizer_step` None means one optimizer step per train step. `head_chunk_tokens` bounds the
    rows of the logits that exist at once. `reference_given`: batches bring the reference's log-probs along.
    `max_nonfinite_steps` is how many skipped steps in a row are borne; the next one ends the run. `critic` None:
    batches bring their advantages along; `opd_kl_coef` weighs the pull to a teacher whose log-probs they bring.
    Where `offload` is given, the state lies in a file of that folder while the memory is given back.
    `ranks` processes share the work (turnout.train.sharded), `tensor_parallel` of them each product of matrices;
    the rest of `ranks` is data parallel. `expert_parallel` of all ranks hold the experts together.
    """

    checkpoint: Path
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    threads: int = 2
    optimizer: OptimizerSettings = OptimizerSettings()
    loss: LossSettings = LossSettings()
    advantage: AdvantageSettings = AdvantageSettings()
    temperature: float = 1.0
    max_tokens_per_micro_batch: int = 2048
    head_chunk_tokens: int = 512
    gradient_checkpointing: bool = False
    reference: Path | None = None
    reference_given: bool = False
    samples_per_optimizer_step: int | None = None
    deterministic: bool = False
    seed: int = 0
    max_nonfinite_steps: int = 3
    ranks: int = 1
    offload: Path | None = None
    tensor_parallel: int = 1
    expert_parallel: int = 1
    critic: CriticSettings | None = None
    opd_kl_coef: float = 0.0

    def faults(self) -> list[Fault]:
        """Everything wrong with these values, named by the flags that set them."""
        o, loss, off = self.optimizer, self.loss, self.loss.off_policy
        low, cap = off.bounds if off.kind in OFF_POLICY_BOUNDS else (0.0, math.inf)
        positive = "must be above 0"
        rules: list[tuple[bool, str, object, str]] = [
            (self.dtype in ("bfloat16", "float32"), "--dtype", self.dtype, "must be bfloat16 or float32"),
            (self.threads >= 1, "--trainer-threads", self.threads, "must be at least 1"),
            (self.temperature > 0, "--rollout-temperature", self.temperature, positive),
            (self.max_tokens_per_micro_batch > 0, "--max-tokens-per-gpu", self.max_tokens_per_micro_batch,
             positive),
            (self.head_chunk_tokens > 0, "--head-chunk-tokens", self.head_chunk_tokens, positive),
            (self.samples_per_optimizer_step is None or self.samples_per_optimizer_step > 0,
             "--global-batch-size", self.samples_per_optimizer_step, positive),
            (self.max_nonfinite_steps >= 0, "--max-nonfinite-steps", self.max_nonfinite_steps, "must be 0 or more"),
            (self.ranks >= 1, "--actor-num-gpus-per-node, --actor-num-nodes", self.ranks, "must be at least 1"),
            (self.tensor_parallel >= 1 and self.ranks % self.tensor_parallel == 0, "--tensor-model-parallel-size",
             self.tensor_parallel, f"must divide the {self.ranks} trainer devices"),
            (self.expert_parallel >= 1 and self.ranks % self.expert_parallel == 0, "--expert-model-parallel-size",
             self.expert_parallel, f"must divide the {self.ranks} trainer devices"),
            (o.lr >= 0, "--lr", o.lr, "must be 0 or more"),
            (all(0 <= b < 1 for b in o.betas), "--adam-beta1, --adam-beta2", o.betas, "must be in [0, 1)"),
            (o.eps > 0, "--adam-eps", o.eps, positive),
            (o.clip_grad >= 0, "--clip-grad", o.clip_grad, "must be 0 or more"),
            (o.schedule in ("constant", "linear", "cosine"), "--lr-decay-style", o.schedule,
             "must be constant, linear or cosine"),
            (o.warmup_steps >= 0, "--lr-warmup-iters", o.warmup_steps, "must be 0 or more"),
            (o.schedule == "constant" or o.total_steps > o.warmup_steps, "--lr-decay-iters", o.total_steps,
             f"must be above the {o.warmup_steps} warmup steps"),
            (0 <= o.min_lr_ratio <= 1, "--min-lr-ratio", o.min_lr_ratio, "must be between 0 and 1"),
            (0 < loss.eps_clip <= 1, "--eps-clip", loss.eps_clip, "must be in (0, 1]"),
            (loss.eps_clip_c is None or loss.eps_clip_c > 1, "--eps-clip-c", loss.eps_clip_c, "must be above 1"),
            (loss.entropy_coef >= 0, "--entropy-coef", loss.entropy_coef, "must be 0 or more"),
            (loss.eps_clip_high > 0, "--eps-clip-high", loss.eps_clip_high, positive),
            (loss.kl_kind in ("k1", "k2", "k3", "low_var_kl"), "--kl-loss-type", loss.kl_kind,
             "must be k1, k2, k3 or low_var_kl"),
            (loss.aggregate in ("token", "sample", "constant"), "--loss-aggregation", loss.aggregate,
             "must be token, sample or constant"),
            (loss.kl_coef >= 0, "--kl-loss-coef", loss.kl_coef, "must be 0 or more"),
            (loss.kl_coef == 0 or self.reference is not None or self.reference_given, "--kl-loss-coef",
             loss.kl_coef, "needs a reference model, and --ref-load is not set"),
            (self.advantage.kl_coef == 0 or self.reference is not None or self.reference_given, "--kl-coef",
             self.advantage.kl_coef, "needs a reference model, and --ref-load is not set"),
            (off.kind in OFF_POLICY_BOUNDS, "--off-policy", off.kind,
             f"must be one of {', '.join(OFF_POLICY_BOUNDS)}"),
            (0 <= low < 1 < cap, "--off-policy-clip, --off-policy-clip-low", (low, cap), "must enclose 1"),
            (not (off.rollout_logprobs and off.kind != "none"), "--use-rollout-logprobs", off.kind,
             "is another correction than --off-policy: the ratio to the engine's log-probs holds it already"),
            (0 <= off.min_ess <= 1, "--min-ess", off.min_ess, "must be between 0 and 1"),
            (off.max_low_steps >= 0, "--max-low-ess-steps", off.max_low_steps, "must be 0 or more"),
        ]  # fmt: skip
        balance = loss.balance_coef or 0.0
        rules.append((balance >= 0, "--moe-aux-loss-coeff", balance, "must be 0 or more"))
        rules.append((self.opd_kl_coef >= 0, "--opd-kl-coef", self.opd_kl_coef, "must be 0 or more"))
        if self.critic is not None:
            rules += self.critic.rules()
        return [Fault(where, str(value), reason) for holds, where, value, reason in rules if not holds]
