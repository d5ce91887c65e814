"""From the configuration to the settings of the trainer. Pure, as turnout.schedule.wiring."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from turnout.config.estimators import ESTIMATORS
from turnout.config.run_config import RunConfig
from turnout.config.rundir import RunPaths
from turnout.placement.ray_data import ObjectStoreData
from turnout.schedule.wiring import cpu_count
from turnout.train.rank_launch import RankPlan
from turnout.train.settings import (
    AdvantageSettings,
    CriticSettings,
    LossSettings,
    OffPolicy,
    OptimizerSettings,
    Overlong,
    TrainerSettings,
)

log = logging.getLogger(__name__)


def trainer_settings(config: RunConfig, model: Path, total_steps: int | None) -> TrainerSettings:
    """`total_steps` is the number of train steps where it is known; a decaying learning rate needs it. The policy's
    optimizer has none of those that train the critic alone."""
    steps = 1 if total_steps is None else total_steps
    needs_reference = config.uses_reference and config.ref_model is None
    reference = Path(config.ref_load) if config.ref_load is not None else model
    optimizer = OptimizerSettings(
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        clip_grad=config.clip_grad,
        schedule=config.lr_decay_style,
        warmup_steps=config.lr_warmup_iters,
        total_steps=max(1, (steps - config.num_critic_only_steps) * config.inner_steps),
        min_lr_ratio=config.min_lr_ratio,
    )
    return TrainerSettings(
        checkpoint=model,
        dtype=config.dtype,
        threads=config.trainer_thread_count(cpu_count()),
        optimizer=optimizer,
        loss=loss_settings(config),
        advantage=advantage_settings(config),
        temperature=config.rollout_temperature,
        max_tokens_per_micro_batch=config.max_tokens_per_gpu,
        head_chunk_tokens=config.head_chunk_tokens,
        gradient_checkpointing=config.gradient_checkpointing,
        reference=reference if needs_reference else None,
        reference_given=config.uses_reference and not needs_reference,
        samples_per_optimizer_step=config.optimizer_samples if config.inner_steps > 1 else None,
        deterministic=config.deterministic,
        seed=config.seed,
        max_nonfinite_steps=config.max_nonfinite_steps,
        critic=critic_settings(config, model, optimizer, steps) if config.has_critic else None,
        opd_kl_coef=config.opd_kl_coef if config.use_opd else 0.0,
        ranks=config.actor_gpus,
        tensor_parallel=config.tensor_model_parallel_size,
        expert_parallel=config.expert_model_parallel_size,
    )


def critic_settings(config: RunConfig, model: Path, policy: OptimizerSettings, steps: int) -> CriticSettings:
    """The critic's optimizer is the policy's but for its learning rate; it has all train steps."""
    lr = config.lr if config.critic_lr is None else config.critic_lr
    total = max(1, steps * config.inner_steps)
    return CriticSettings(
        model if config.critic_load is None else Path(config.critic_load),
        replace(policy, lr=lr, warmup_steps=config.critic_lr_warmup_iters, total_steps=total),
        config.lambd,
        config.value_clip,
        config.num_critic_only_steps,
    )


def rank_plan(config: RunConfig, paths: RunPaths) -> RankPlan | None:
    """The trainer's processes; None: it is a thread of this one. In a cluster each has its log on its node."""
    way = config.rollout_data_transport
    if config.actor_gpus == 1:
        if way not in (None, "local"):
            log.info("--rollout-data-transport %s: a trainer of one device has the data in its process", way)
        return None
    count, threads = config.actor_gpus, config.trainer_thread_count(cpu_count())
    plan = RankPlan(count, threads, paths.trainer, config.train_step_timeout_s)
    if config.ranks_in_cluster:
        shared = ("--run-dir", paths.trainer), ("--save", paths.checkpoints)
        plan = replace(plan, data=ObjectStoreData(), shared=shared)
    return plan


def loss_settings(config: RunConfig) -> LossSettings:
    estimator = ESTIMATORS[config.advantage_estimator]
    low, high = config.clip_range
    unsaid = "k1" if config.kl_coef > 0 else "k3"
    aggregation = config.loss_aggregation
    return LossSettings(
        name="sft" if config.fine_tunes else estimator.loss,
        eps_clip=low,
        eps_clip_high=high,
        eps_clip_c=config.eps_clip_c,
        kl_coef=config.kl_loss_coef,
        kl_kind=unsaid if config.kl_loss_type is None else config.kl_loss_type,
        unbiased_kl=config.use_unbiased_kl,
        entropy_coef=config.entropy_coef,
        balance_coef=config.moe_aux_loss_coeff if config.moe_router_load_balancing_type != "none" else None,
        opsm_delta=_given(config.opsm_delta, 1e-4) if config.use_opsm else None,
        aggregate=estimator.aggregation if aggregation is None else aggregation,
        constant_length=config.rollout_max_response_len,
        function=config.custom_loss_function_path,
        off_policy=OffPolicy(
            config.off_policy,
            config.off_policy_clip_low,
            config.off_policy_clip,
            config.prox_logp,
            config.use_rollout_logprobs,
            config.min_ess,
            config.max_low_ess_steps,
        ),
    )


def advantage_settings(config: RunConfig) -> AdvantageSettings:
    estimator = ESTIMATORS[config.advantage_estimator]
    overlong = None
    if config.overlong_buffer_len is not None:
        factor = _given(config.overlong_penalty_factor, 1.0)
        overlong = Overlong(config.rollout_max_response_len, config.overlong_buffer_len, factor)
    return AdvantageSettings(
        estimator.baseline,
        estimator.std if config.grpo_std_normalization is None else config.grpo_std_normalization,
        estimator.normalize if config.normalize_advantages is None else config.normalize_advantages,
        config.gamma,
        config.kl_coef,
        overlong,
        config.mask_truncated_completions,
        config.custom_advantage_function_path,
    )


def _given(value: float | None, unset: float) -> float:
    return unset if value is None else value
