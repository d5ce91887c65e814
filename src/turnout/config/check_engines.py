"""What must hold between the options of the engines that a run starts."""

from __future__ import annotations

import os
from collections.abc import Iterator

from turnout.config.run_config import RunConfig
from turnout.config.server_groups import divisors
from turnout.core.errors import Fault


def step_holds_decodes(c: RunConfig) -> Iterator[Fault]:
    if c.engine_step_tokens < c.engine_max_running_requests:
        reason = (
            f"each of --engine-max-running-requests {c.engine_max_running_requests} decodes one token a step"
        )
        yield Fault(
            "--engine-step-tokens", str(c.engine_step_tokens), reason, "raise it, or lower the requests"
        )


def experts_are_divided(c: RunConfig) -> Iterator[Fault]:
    size, ranks = c.engine_expert_parallel_size, c.rollout_num_gpus_per_engine
    if ranks % size:
        reason = f"does not divide --rollout-num-gpus-per-engine {ranks}"
        yield Fault("--engine-expert-parallel-size", str(size), reason, f"fit: {divisors(ranks)}")


def deterministic_threads(c: RunConfig) -> Iterator[Fault]:
    """With one thread a row of a matrix product depends neither on the batch nor on the split of work."""
    if not c.deterministic:
        return
    for flag, value in (("--engine-threads", c.engine_threads), ("--trainer-threads", c.trainer_threads)):
        if value != 1:
            shown = "" if value is None else str(value)
            yield Fault(flag, shown, "--deterministic requires one thread", f"give {flag} 1")


def restarts_are_used(c: RunConfig) -> Iterator[Fault]:
    if c.engine_restarts is not None and not c.use_fault_tolerance:
        reason = "no engine is started again"
        yield Fault("--engine-restarts", str(c.engine_restarts), reason, "give --use-fault-tolerance")


def engines_may_linger(c: RunConfig) -> Iterator[Fault]:
    if not c.engine_linger:
        return
    if c.engine == "sglang":
        reason = "an SGLang ends with the controller that started it"
        yield Fault("--engine-linger", f"{c.engine_linger:g}", reason, "leave it out")
    elif not hasattr(os, "pidfd_open"):
        reason = "only Linux tells an engine of the end of a process that did not start it"
        yield Fault("--engine-linger", f"{c.engine_linger:g}", reason, "leave it out")


ENGINE_CHECKS = (
    step_holds_decodes,
    experts_are_divided,
    deterministic_threads,
    restarts_are_used,
    engines_may_linger,
)
