"""The held-out sets of a configuration: prompts, sampling and rewards of each, and when they are scored.

Promises: everything about them that can be refused is refused here, before anything is started; a value stands in
the data set's own settings (--eval-config), else in the run's options.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from turnout.config.eval_sets import FLAG, EvalDataset, read_eval_sets
from turnout.config.run_config import RunConfig
from turnout.core.errors import ConfigError, Fault
from turnout.core.rng import SeedTree
from turnout.core.version import VersionConstraint, WeightVersion
from turnout.protocol.sglang import SamplingParams
from turnout.rollout.evaluate import EvalMeans, EvalSet
from turnout.rollout.prompts import load_prompts
from turnout.rollout.rewards import RewardRunner, load_reward
from turnout.rollout.sampler import Routes, SamplingPlan
from turnout.rollout.tokenizer import HubTokenizer
from turnout.rollout.worker import Generator, Samples
from turnout.schedule import wiring
from turnout.schedule.evaluations import EVAL_SEEDS, EvalPlan, EvalRuns, EvalWorld
from turnout.serving.client import EngineClient
from turnout.transfer.updater import Updater

HELD_OUT, SAMPLED, BASELINE = "held-out", "held-out, sampled", "baseline"
T = TypeVar("T")


def load_eval_plan(config: RunConfig, tokenizer: HubTokenizer) -> EvalPlan:
    """Held-out sets of the configuration, loaded; raises UserError as load_prompts does."""
    if config.eval_config is not None:
        path = Path(config.eval_config).expanduser()
        sets = [_set(config, tokenizer, given) for given in read_eval_sets(path)]
    elif config.eval_prompt_data is not None:
        sets = [_set(config, tokenizer, EvalDataset(name=HELD_OUT, path=config.eval_prompt_data))]
    else:
        sets = []
    before_only: list[EvalSet] = []
    if config.eval_sampled and sets:
        plan = sampling(config, EvalDataset(name=HELD_OUT, path="-", temperature=config.rollout_temperature))
        sets.append(EvalSet(SAMPLED, sets[0].prompts, plan))
    if config.eval_baseline_data is not None:
        before_only = [_set(config, tokenizer, EvalDataset(name=BASELINE, path=config.eval_baseline_data))]
    return EvalPlan(
        sets,
        before_only,
        config.eval_interval,
        config.skip_eval_before_train,
        mode=config.eval_mode,
        beside=config.schedule == "async" or config.eval_mode == "dedicated",
        hold_s=config.eval_hold,
    )


def make_evaluations(
    plan: EvalPlan,
    updater: Updater,
    rewards: RewardRunner,
    samples: Callable[[Routes], Samples],
    world: EvalWorld,
) -> EvalRuns:
    """The evaluations of a run, by what `samples` makes. Their requests go to engines that serve the version asked
    for, and no other."""

    def current() -> tuple[WeightVersion, int]:
        held = updater.fleet.current
        assert held is not None, "the base version is adopted before anything asks"
        return held.version, held.step

    def pinned() -> list[EngineClient]:
        return updater.fleet.routable(VersionConstraint(current()[0].label, exact=True))

    fleet, apart = updater.fleet, world.dedicated
    routes = Routes(pinned, changed=fleet.changed, prefills=fleet.prefills)
    if apart is not None:
        routes = Routes(apart.routable, changed=apart.changed)
    generator = Generator(samples(routes), rewards, world.phases.waits)
    return EvalRuns(plan, EvalMeans(generator, rewards, SeedTree(*EVAL_SEEDS)), world, current)


def sampling(config: RunConfig, given: EvalDataset) -> SamplingPlan:
    """How a set is sampled: its own values, else the options of evaluation, else those of rollouts."""
    temperature = _first(given.temperature, config.eval_temperature)
    samples = _first(given.n_samples_per_eval_prompt, config.n_samples_per_eval_prompt)
    if temperature == 0 and given.n_samples_per_eval_prompt not in (None, 1):
        reason = "at temperature 0 all samples of a prompt are equal"
        raise ConfigError(Fault(f"{FLAG}: {given.name}", str(samples), reason, "raise the temperature"))
    params = SamplingParams(
        max_new_tokens=_first(given.max_response_len, config.eval_response_limit),
        min_new_tokens=_first(given.min_new_tokens, 0),
        temperature=temperature,
        top_p=_first(given.top_p, 1.0),
        top_k=_first(given.top_k, -1),
        stop=tuple(_first(given.stop, config.rollout_stop)),
        stop_token_ids=tuple(_first(given.stop_token_ids, config.rollout_stop_token_ids)),
    )
    if params.min_new_tokens > params.max_new_tokens:
        reason = f"min_new_tokens is more than the {params.max_new_tokens} tokens of a response"
        raise ConfigError(Fault(f"{FLAG}: {given.name}", str(params.min_new_tokens), reason))
    return SamplingPlan(samples if temperature > 0 else 1, params, config.rollout_request_timeout_s, 1)


def _set(config: RunConfig, tokenizer: HubTokenizer, given: EvalDataset) -> EvalSet:
    own = given.rm_type if given.rm_type is not None else given.custom_rm_path
    if own is None and config.group_rm:
        reason = "--group-rm scores groups, evaluation scores single responses"
        raise ConfigError(Fault(f"{FLAG}: {given.name}", "", reason, "give rm_type or custom_rm_path"))
    keys = _first(given.input_key, config.eval_keys[0]), _first(given.label_key, config.eval_keys[1])
    prompts = load_prompts(wiring.data(config, given.path, keys), tokenizer)
    return EvalSet(
        given.name,
        prompts[: _first(given.num_prompts, config.eval_num_prompts)],
        sampling(config, given),
        None if own is None else load_reward(own),
    )


def _first(own: T | None, otherwise: T) -> T:
    return otherwise if own is None else own
