"""Options of the loss, the optimizer and the train step's memory."""

from __future__ import annotations

from typing import ClassVar, Literal

from turnout.config.option import PATH, Options, option


class AlgorithmOptions(Options):
    title: ClassVar[str] = "Algorithm"

    advantage_estimator: Literal[
        "grpo",
        "dr_grpo",
        "dapo",
        "gspo",
        "cispo",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "ppo",
    ] = option("grpo", "The algorithm: how rewards become advantages, and the loss (docs/algorithms/).")
    grpo_std_normalization: bool | None = option(
        None,
        "Divide a group's advantages by the standard deviation of its rewards.",
        unset="true for grpo, dapo, gspo and cispo",
    )
    normalize_advantages: bool | None = option(
        None,
        "Take mean and standard deviation of all trained tokens of a train step away from the advantages.",
        unset="true for reinforce_plus_plus and reinforce_plus_plus_baseline",
    )
    gamma: float = option(
        1.0, "Discount of the reward per token, back from the end of a response.", gt=0, le=1
    )
    eps_clip: float | None = option(
        None,
        "Clip range of the probability ratio below 1; 1 is no bound.",
        unset="0.2; gspo 0.0003, cispo 1",
        gt=0,
        le=1,
    )
    eps_clip_high: float | None = option(
        None,
        "Clip range of the probability ratio above 1.",
        unset="--eps-clip where that is given, else 0.2; dapo 0.28, gspo 0.0004, cispo 4",
        gt=0,
    )
    eps_clip_c: float | None = option(
        None, "Largest ratio that counts where the advantage is negative (dual clip).", unset="none", gt=1
    )
    loss_aggregation: Literal["token", "sample", "constant"] | None = option(
        None,
        "Mean of the loss: over all tokens of an optimizer step; over samples of each sample's own mean; or over "
        "samples of the sum of each, divided by --rollout-max-response-len.",
        unset="token; dr_grpo constant, gspo sample",
    )
    use_kl_loss: bool = option(
        False,
        "Compute the KL to the frozen reference; it enters the loss by --kl-loss-coef, 0 only reports it.",
    )
    kl_loss_coef: float = option(0.0, "Weight of the KL in the loss.", ge=0)
    kl_coef: float = option(0.0, "Weight of the KL to the frozen reference in the reward.", ge=0)
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] | None = option(
        None,
        "Estimator of the KL: log-ratio, half its square, the unbiased one that is never negative, or that one up "
        "to 10.",
        unset="k3 in the loss, k1 in the reward",
    )
    use_unbiased_kl: bool = option(False, "Weigh the KL in the loss by the probability ratio.")
    entropy_coef: float = option(0.0, "Weight of the entropy in the loss: a bonus.", ge=0)
    use_rollout_routing_replay: bool = option(
        False,
        "Mixtures of experts: the trainer sends each token through the experts that the engine sampled it with. An "
        "external SGLang needs --enable-return-routed-experts.",
    )
    moe_router_load_balancing_type: Literal["none", "seq_aux_loss"] = option(
        "none",
        "Mixtures of experts: the loss that balances the experts, within each sequence; it enters the loss by "
        "--moe-aux-loss-coeff, 0 only reports it (docs/guides/sharded-training.md).",
    )
    moe_aux_loss_coeff: float = option(0.0, "Weight of that in the loss.", ge=0)
    use_opsm: bool = option(
        False,
        "Leave out of the loss what has a negative advantage in a response that moved away from the policy that "
        "made it (off-policy sequence masking).",
    )
    opsm_delta: float | None = option(
        None, "Mean log-ratio over a response above which --use-opsm leaves it out.", unset="0.0001", gt=0
    )
    overlong_buffer_len: int | None = option(
        None,
        "The last tokens before --rollout-max-response-len, in which a response loses more and more of its reward.",
        unit="tokens",
        unset="no length costs anything",
        ge=1,
    )
    overlong_penalty_factor: float | None = option(
        None, "What a response of full length loses of its reward.", unset="1", gt=0
    )
    mask_truncated_completions: bool = option(
        False, "Leave responses that were cut at their limit out of the loss; they count in baselines."
    )
    custom_advantage_function_path: str | None = option(
        None,
        "A function of your own that makes the advantages of a train step's samples, path/to/file.py:function or "
        "package.module.function (docs/algorithms/custom.md).",
        unset="as --advantage-estimator says",
        pattern=PATH,
    )
    custom_loss_function_path: str | None = option(
        None,
        "A function of your own that gives each token's loss, in place of the clipped ratio.",
        unset="as --advantage-estimator says",
        pattern=PATH,
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
    trainer_threads: int | None = option(
        None, "Compute threads of each rank of the trainer.", unset="the CPUs, shared by the ranks", ge=1
    )
