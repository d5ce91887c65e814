"""What must hold of the options of agents and of rewards written for other trainers. Rules as in
turnout.config.checks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from turnout.config.run_config import RunConfig
from turnout.core.errors import Fault


def one_maker_of_samples(c: RunConfig) -> Iterator[Fault]:
    if c.agent is not None and c.custom_generate_function_path is not None:
        reason = f"two makers of samples: {c.agent} is one as well"
        yield Fault(
            "--custom-generate-function-path", c.custom_generate_function_path, reason, "leave it out"
        )


def agents_context_is_bounded(c: RunConfig) -> Iterator[Fault]:
    if c.agent is not None and c.rollout_max_context_len is None:
        reason = f"the agent {c.agent} writes its own context, and the trainer must hold the longest"
        yield Fault("--rollout-max-context-len", "", reason, "give it")


def one_kind_of_reward(c: RunConfig) -> Iterator[Fault]:
    if not c.trl_rewards:
        return
    if c.fine_tunes:
        reason = "--loss-type sft_loss trains on the answers of --prompt-data, which have no reward"
        yield Fault("--trl-rewards", ", ".join(c.trl_rewards), reason, "leave it out")
    for flag, value in (("--rm-type", c.rm_type), ("--custom-rm-path", c.custom_rm_path)):
        if value is not None:
            reason = f"two rewards: {flag} {value} is given as well"
            yield Fault("--trl-rewards", ", ".join(c.trl_rewards), reason, "leave one of the two out")
    for path, weight in c.trl_rewards.items():
        good = isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight)
        if not good:
            yield Fault("--trl-rewards", f"{path}: {weight!r}", "the weight is no number", "give 1.0")


AGENT_CHECKS = (one_maker_of_samples, agents_context_is_bounded, one_kind_of_reward)
