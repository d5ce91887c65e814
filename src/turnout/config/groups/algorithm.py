"""Options of the loss, the optimizer and the train step's memory."""

from __future__ import annotations

from typing import ClassVar, Literal

from turnout.config.option import Options, option


class AlgorithmOptions(Options):
    title: ClassVar[str] = "Algorithm"

    advantage_estimator: Literal["grpo"] = option(
        "grpo", "How rewards become advantages: the reward less the mean of its group."
    )
    grpo_std_normalization: bool = option(
        True, "Divide a group's advantages by the standard deviation of its rewards (off: Dr. GRPO)."
    )
    eps_clip: float = option(0.2, "Clip range of the probability ratio below 1.", gt=0, lt=1)
    eps_clip_high: float | None = option(
        None, "Clip range of the probability ratio above 1.", unset="--eps-clip", gt=0
    )
    loss_aggregation: Literal["token", "sample"] = option(
        "token", "Mean of the loss: over all tokens of the batch, or over samples of each sample's own mean."
    )
    use_kl_loss: bool = option(
        False,
        "Compute the KL to the frozen reference; it enters the loss by --kl-loss-coef, 0 only reports it.",
    )
    kl_loss_coef: float = option(0.0, "Weight of the KL in the loss.", ge=0)
    kl_loss_type: Literal["k1", "k2", "k3"] = option(
        "k3", "Estimator of the KL: log-ratio, half its square, or the unbiased one that is never negative."
    )
    global_batch_size: int | None = option(
        None,
        "Samples of one optimizer step.",
        unit="samples",
        unset="--rollout-batch-size x --n-samples-per-prompt / --num-steps-per-rollout",
        ge=1,
    )
    num_steps_per_rollout: int | None = option(
        None, "Optimizer steps of one train step.", unset="from --global-batch-size, else 1", ge=1
    )


class OffPolicyOptions(Options):
    title: ClassVar[str] = "Off-policy correction"

    off_policy: Literal["none", "tis", "mis", "sequence", "decoupled"] = option(
        "none",
        "Weight of a token by how likely the trainer finds it against the engine that made it: none; tis, cut off "
        "at --off-policy-clip; mis, 0 outside the clips; sequence, of the whole response, truncated; decoupled, 0 "
        "above the clip, with the ratio clipped around the trainer's own policy (docs/guides/async.md).",
    )
    off_policy_clip: float | None = option(
        None, "Largest weight.", unset="2 for tis and sequence, 5 for mis and decoupled", gt=1
    )
    off_policy_clip_low: float | None = option(
        None, "Smallest weight.", unset="0.5 for mis, 0 for the others", ge=0, lt=1
    )
    prox_logp: Literal["recompute", "interpolate"] = option(
        "recompute",
        "The proximal policy of --off-policy decoupled: the trainer's before the train step, which costs a forward "
        "where --num-steps-per-rollout is above 1; or interpolated from the lag, which costs nothing.",
    )
    use_rollout_logprobs: bool = option(
        False, "Clip the probability ratio to the engine's log-probs instead of the trainer's own."
    )
    min_ess: float = option(
        0.1,
        "Effective sample size of a train step, as a share of its tokens (of its responses for --off-policy "
        "sequence), below which a step is warned of.",
        ge=0,
        le=1,
    )
    max_low_ess_steps: int = option(
        3, "Train steps in a row that may be below --min-ess; one more ends the run.", ge=0
    )


class OptimizerOptions(Options):
    title: ClassVar[str] = "Optimizer"

    lr: float = option(1e-6, "Peak learning rate of AdamW.", gt=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = option(
        "constant", "Learning rate after the warm-up, over the optimizer steps of --num-rollout."
    )
    lr_warmup_iters: int = option(0, "Optimizer steps in which the learning rate rises from 0.", ge=0)
    min_lr_ratio: float = option(0.0, "Where the decay ends, as a share of --lr.", ge=0, le=1)
    weight_decay: float = option(0.0, "Decoupled weight decay of matrices; vectors have none.", ge=0)
    adam_beta1: float = option(0.9, "Decay of the first moment.", ge=0, lt=1)
    adam_beta2: float = option(0.98, "Decay of the second moment.", ge=0, lt=1)
    adam_eps: float = option(1e-8, "Added to the root of the second moment.", gt=0)
    clip_grad: float = option(
        1.0, "Largest norm of the gradient, larger ones are scaled; 0 is no limit.", ge=0
    )
    max_nonfinite_steps: int = option(
        3,
        "Optimizer steps in a row that may be skipped for a gradient that isn't finite; 0 allows none.",
        ge=0,
    )


class TrainerOptions(Options):
    title: ClassVar[str] = "Trainer"

    max_tokens_per_gpu: int = option(
        2048,
        "Tokens of one packed micro-batch; bounds the memory of a train step. A sample must fit.",
        unit="tokens",
        ge=1,
    )
    head_chunk_tokens: int = option(512, "Response tokens whose logits exist at a time.", unit="tokens", ge=1)
    gradient_checkpointing: bool = option(
        False, "Compute activations again in the backward pass: less memory, about a third more time."
    )
    train_step_timeout_s: float = option(3600.0, "Deadline of one train step.", unit="seconds", gt=0)
    trainer_threads: int | None = option(None, "Compute threads of the trainer.", unset="the CPUs", ge=1)
