"""What must hold of the options of PPO's critic. Rules as in turnout.config.checks."""

from __future__ import annotations

from collections.abc import Iterator

from turnout.config.run_config import RunConfig, specs
from turnout.core.errors import Fault

OF_CRITIC = (
    "critic_load", "critic_lr", "critic_lr_warmup_iters", "num_critic_only_steps", "value_clip", "lambd",
)  # fmt: skip


def critic_is_there(c: RunConfig) -> Iterator[Fault]:
    if c.has_critic:
        return
    for spec in (specs()[name] for name in OF_CRITIC):
        value = getattr(c, spec.name)
        if value != spec.default:
            yield Fault(spec.flag, str(value), "the run has no critic", "give --advantage-estimator ppo")


def critic_plan(c: RunConfig) -> Iterator[Fault]:
    if c.has_critic and c.num_rollout is not None:
        total = c.num_rollout * c.inner_steps
        if c.critic_lr_warmup_iters >= total:
            reason = f"the run has only {total} optimizer steps"
            warmup = c.critic_lr_warmup_iters
            yield Fault("--critic-lr-warmup-iters", str(warmup), reason, f"give at most {total - 1}")
        if c.num_critic_only_steps >= c.num_rollout:
            reason = f"the run has only {c.num_rollout} train steps: the policy would never be trained"
            alone = c.num_critic_only_steps
            yield Fault("--num-critic-only-steps", str(alone), reason, f"give at most {c.num_rollout - 1}")


CRITIC_CHECKS = (critic_is_there, critic_plan)
