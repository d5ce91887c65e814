"""What a world is, drawn from its seed: the options of the run, the engines, how long things take.

Promises: the options are a RunConfig that `turnout train` would accept; the same seed gives the same world,
whatever faults are asked for.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from turnout.config.checks import Known, check_all
from turnout.config.run_config import RunConfig, specs
from turnout.core.errors import ConfigError
from turnout.core.types import Prompt
from turnout.protocol.sglang import SamplingParams
from turnout.rollout.evaluate import EvalSet
from turnout.rollout.sampler import SamplingPlan
from turnout.schedule.evaluations import EvalPlan
from turnout.sim.model import EngineShape, prompt_ids
from turnout.sim.record import Rules
from turnout.sim.report import SCHEDULE_NAMES

STEPS, GROUPS, PROMPTS = 20, 10, 1000


@dataclass(frozen=True)
class WorldPlan:
    """`engines` each with its own speed, the first `prefills` of them prefill engines, the others then decode;
    `train_s` is the range of a train step in seconds; `detached`: versions are brought to engines without the
    trainer (turnout.transfer.transport)."""

    config: RunConfig
    engines: tuple[EngineShape, ...]
    train_s: tuple[float, float]
    median: float
    detached: bool
    evals: EvalPlan
    prefills: int = 0

    @cached_property
    def rules(self) -> Rules:
        config = self.config
        return Rules(
            slots=config.slots,
            window=config.window,
            max_staleness=config.max_staleness,
            per_step=config.rollout_batch_size,
            samples=config.n_samples_per_prompt,
            min_group=config.min_group,
            most_tokens=config.rollout_max_response_len,
            engine_lag=config.max_engine_lag,
            steps=STEPS,
            median=self.median,
            deterministic=config.deterministic,
        )


def plan_of(seed: int, schedule: str | None = None, **fixed: Any) -> WorldPlan:
    """The world of a seed; `schedule` and options in `fixed` are not drawn."""
    rng = random.Random(f"plan/{seed}")
    engines = rng.randint(1, 4)
    median = rng.choice((8.0, 16.0, 24.0))
    options: dict[str, Any] = {
        "hf_checkpoint": "tiny:llama",
        "prompt_data": "reasoning_gym:chain_sum",
        "custom_rm_path": "turnout.sim.rewards:reward",
        "num_rollout": STEPS,
        "seed": seed,
        "rollout_batch_size": GROUPS,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": rng.choice((64, 128)),
        "rollout_request_timeout_s": 60.0,
        "reward_timeout_s": 10.0,
        "rollout_timeout_s": 600.0,
        "train_step_timeout_s": 600.0,
        "update_weight_timeout_s": 60.0,
        "rollout_num_engines": engines,
        "min_engines": rng.choice((None, 1, 1, 1)),
        "max_failed_groups": 200,
        "engine_threads": 1,
        "trainer_threads": 1,
        "dynamic_sampling": rng.random() < 0.2,
        "deterministic": rng.random() < 0.25,
    } | _schedule(rng, schedule)
    options["save_interval"] = rng.choice((1, 2, 4)) * options["update_weights_interval"]
    again = random.Random(f"again/{seed}").random() < 0.5  # a source of its own: the rest stays what it was
    pairs = random.Random(f"pairs/{seed}")
    prefills = pairs.randint(1, engines - 1) if engines > 1 and pairs.random() < 0.25 else 0
    if prefills:  # where no half comes again the first crash ends most runs: few worlds of that
        again = pairs.random() < 0.8
        options["min_engines"] = options["min_engines"] and 2
    options |= {"use_fault_tolerance": again} | fixed
    options = _in_flight(seed, options) | options
    if options["deterministic"]:
        options.pop("rollout_window", None)
    shapes = tuple(_engine(rng, median) for _ in range(engines))
    options["engine_max_running_requests"] = min(shape.running for shape in shapes)
    low = rng.choice((0.2, 2.0, 8.0))
    config, detached = _checked(options), rng.random() < 0.6
    return WorldPlan(config, shapes, (low, 2 * low), median, detached, _evals(rng, config), prefills)


def prompts_of(seed: int, count: int = PROMPTS, first: int = 0) -> list[Prompt]:
    """The data of a world; held-out prompts have numbers of their own (`first`)."""
    rng = random.Random(f"prompts/{seed}/{first}")
    made = [prompt_ids(index, rng.randint(4, 12)) for index in range(first, first + count)]
    return [Prompt(f"p{ids[1]}", ids, f"prompt {ids[1]}") for ids in made]


def _evals(rng: random.Random, config: RunConfig) -> EvalPlan:
    """Evaluations every few steps, of a few prompts, in some worlds; in async beside training."""
    if rng.random() < 0.5:
        return EvalPlan((), (), None, True)
    params = SamplingParams(max_new_tokens=config.rollout_max_response_len, temperature=1.0)
    sampling = SamplingPlan(1, params, config.rollout_request_timeout_s, 1)
    held_out = EvalSet("held-out", prompts_of(config.seed, 4, PROMPTS), sampling)
    return EvalPlan((held_out,), (), rng.choice((3, 5)), False, "shared", config.schedule == "async", 60.0)


def _schedule(rng: random.Random, asked: str | None) -> dict[str, Any]:
    drawn = rng.choice((*SCHEDULE_NAMES, "async"))
    name = drawn if asked is None else asked
    interval = rng.choice((1, 1, 1, 2))
    least = {"sync": interval - 1, "pipelined": interval, "async": interval - 1}[name]
    staleness = least + rng.randint(0, 2)
    options: dict[str, Any] = {
        "schedule": name,
        "on_resume": rng.choice(("replay", "mask", "drop")),
        "update_weights_interval": interval,
        "max_staleness": staleness,
        "staleness_policy": rng.choice(("drop", "replay", "replay", "mask")),
    }
    if name == "async":
        window, lag = rng.choice((1, 1, 3, GROUPS // 2)), rng.choice((0, 0, 1))
        least = lag + interval - (window == 1)  # so that the slots hold the groups between two versions
        lead = max(staleness, least) + rng.choice((0, 1, 2))
        options |= {"max_lead": lead, "rollout_window": window, "max_engine_lag": lag}
    return options


def _in_flight(seed: int, drawn: dict[str, Any]) -> dict[str, Any]:
    """What becomes of requests that are in flight when the weights change, or when a batch is complete."""
    rng = random.Random(f"in flight/{seed}")
    if drawn["deterministic"]:
        return {}
    if drawn["schedule"] == "async":
        policy = rng.choice((None, "drain", "abort", "retract", "continue"))
        return {"on_weight_update": policy, "mask_kv_mixed": policy == "continue" and rng.random() < 0.5}
    if rng.random() < 0.5:
        return {}
    partial = rng.random() < 0.7
    return {
        "over_sampling_batch_size": GROUPS + rng.choice((2, 5, 10)),
        "partial_rollout": partial,
        "mask_offpolicy_in_partial_rollout": partial and rng.random() < 0.5,
    }


def _engine(rng: random.Random, median: float) -> EngineShape:
    """KV space for a few long responses at once, so that some are put back."""
    running = rng.choice((4, 8, 16))
    return EngineShape(
        speed=rng.choice((20.0, 50.0, 100.0)),
        chunk=rng.choice((8, 16)),
        running=running,
        kv_tokens=int(running * (0.6 * median + 10)),
        median=median,
    )


def _checked(options: dict[str, Any]) -> RunConfig:
    """Raises ConfigError as `turnout train` does."""
    defaults = {name: spec.default for name, spec in specs().items() if not spec.required}
    faults = check_all(Known(defaults | options), {name: spec.flag for name, spec in specs().items()})
    if faults:
        raise ConfigError(faults)
    return RunConfig.model_validate(options)
