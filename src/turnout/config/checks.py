"""What must hold between options. A table of small functions, each yields the faults it sees.

Owns the rules; the files that a rule looks at are only asked whether they exist. Promises: every rule runs on
whatever values are known to be valid; a rule that needs one that isn't known ends there, and the others go on.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, cast

from turnout.config.check_agents import AGENT_CHECKS
from turnout.config.check_algorithm import ALGORITHM_CHECKS
from turnout.config.check_colocated import COLOCATED_CHECKS
from turnout.config.check_critic import CRITIC_CHECKS
from turnout.config.check_debug import DEBUG_CHECKS
from turnout.config.check_engines import (
    ENGINE_CHECKS,
    deterministic_threads,
    experts_are_divided,
    step_holds_decodes,
)
from turnout.config.check_external import EXTERNAL_CHECKS
from turnout.config.check_files import FILE_CHECKS
from turnout.config.check_files import is_file as file_exists
from turnout.config.check_imitation import IMITATION_CHECKS
from turnout.config.check_router import ROUTER_CHECKS, stock_engines_are_alike
from turnout.config.check_schedule import SCHEDULE_CHECKS, update_policy_fits
from turnout.config.check_sglang import SGLANG_CHECKS, one_rank, seeds_count
from turnout.config.check_topology import TOPOLOGY_CHECKS, each_group
from turnout.config.check_weights import (
    WEIGHT_CHECKS,
    checkpoint_engine_can_run,
    engine_applies_deltas,
    hook_has_a_reader,
    quantised_engines,
)
from turnout.config.run_config import RunConfig
from turnout.core.errors import ConfigError, Fault

Check = Callable[[RunConfig], Iterator[Fault]]


class NotKnown(Exception):
    """A rule asked for an option whose value is missing or no good."""


class Known:
    """Looks like a RunConfig to a rule, but has only the valid values; the derived properties work as well."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name in self._values:
            return self._values[name]
        derived = getattr(RunConfig, name, None)
        if isinstance(derived, property) and derived.fget is not None:
            return derived.fget(self)
        raise NotKnown(name)

    def model_copy(self, *, update: dict[str, Any]) -> Known:
        return Known(self._values | update)


def check_all(known: Known, where: dict[str, str]) -> list[Fault]:
    """Faults of all rules; `where` gives the place of each option (a rule itself writes only the flag)."""
    places = {"--" + name.replace("_", "-"): place for name, place in where.items()}
    faults: list[Fault] = []
    for check in CHECKS:
        try:
            for fault in check(cast("RunConfig", known)):
                place = places.get(fault.where, fault.where)
                faults.append(Fault(place, fault.value, fault.reason, fault.remedy))
        except (NotKnown, ConfigError):  # of the groups of engines, which a rule of their own tells
            continue
    return faults


def run_has_an_end(c: RunConfig) -> Iterator[Fault]:
    if c.num_rollout is None and c.num_epoch is None:
        yield Fault("--num-rollout", "", "the run has no end", "give --num-rollout or --num-epoch")


def batch_divides(c: RunConfig) -> Iterator[Fault]:
    total, given, steps = c.samples_per_rollout, c.global_batch_size, c.num_steps_per_rollout
    product = f"--rollout-batch-size {c.rollout_batch_size} x --n-samples-per-prompt {c.n_samples_per_prompt}"
    if given is not None and total % given:
        reason = f"does not divide {product} = {total} samples"
        yield Fault(
            "--global-batch-size", str(given), reason, f"nearest that do: {_near_divisors(total, given)}"
        )
    elif given is not None and steps is not None and given * steps != total:
        reason = f"--num-steps-per-rollout {steps} x {given} is not {product} = {total} samples"
        yield Fault("--global-batch-size", str(given), reason, "leave one of the two out")
    elif given is None and steps is not None and total % steps:
        reason = f"does not divide {product} = {total} samples"
        yield Fault(
            "--num-steps-per-rollout", str(steps), reason, f"nearest that do: {_near_divisors(total, steps)}"
        )


def survivors_fit(c: RunConfig) -> Iterator[Fault]:
    if c.group_failure_policy == "survivors" and c.min_group_size > c.n_samples_per_prompt:
        reason = f"a group has only --n-samples-per-prompt {c.n_samples_per_prompt} members"
        yield Fault("--min-group-size", str(c.min_group_size), reason, "give a smaller number")


def sampling_is_whole(c: RunConfig) -> Iterator[Fault]:
    """Log-probs mean the whole vocabulary; a cut distribution has others, and every ratio would be wrong."""
    reason = "training samples from the whole distribution: its log-probs are over the whole vocabulary"
    for flag, value, neutral in (
        ("--rollout-top-p", c.rollout_top_p, 1.0),
        ("--rollout-top-k", c.rollout_top_k, -1),
        ("--rollout-min-p", c.rollout_min_p, 0.0),
    ):
        if value != neutral:
            yield Fault(flag, f"{value:g}", reason, f"use {flag} {neutral:g}")


def prompt_leaves_room(c: RunConfig) -> Iterator[Fault]:
    """Only between values that were given: a context limit alone leaves prompts of context - 1 tokens."""
    prompt, context = c.rollout_max_prompt_len, c.rollout_max_context_len
    if prompt is None or context is None:
        return
    response = c.rollout_max_response_len
    if prompt + response > context:
        reason = (
            f"with --rollout-max-response-len {response} it passes --rollout-max-context-len {context} "
            f"by {prompt + response - context} tokens"
        )
        room = context - response
        remedy = f"give at most {room}" if room > 0 else "raise the context or lower the response"
        yield Fault("--rollout-max-prompt-len", str(prompt), reason, remedy)


def response_range(c: RunConfig) -> Iterator[Fault]:
    if c.rollout_min_response_len > c.rollout_max_response_len:
        reason = f"longer than --rollout-max-response-len {c.rollout_max_response_len}"
        remedy = f"give at most {c.rollout_max_response_len}"
        yield Fault("--rollout-min-response-len", str(c.rollout_min_response_len), reason, remedy)


def sequence_fits(c: RunConfig) -> Iterator[Fault]:
    """The longest sequence fits a micro-batch of the trainer and, with evaluation, the cache of an engine."""
    prompt = (
        c.prompt_limit or 1
    )  # unknown prompts have a token at least; their own lengths are checked at load
    context = c.rollout_max_context_len
    for flag, limit, response, what in (
        ("--max-tokens-per-gpu", c.max_tokens_per_gpu, c.rollout_max_response_len, "one sample"),
        (
            "--engine-max-total-tokens",
            c.engine_max_total_tokens,
            max(c.rollout_max_response_len, c.eval_response_limit),
            "one request",
        ),
    ):
        need = prompt + response if context is None else min(prompt + response, context)
        if limit < need:
            reason = f"{what} of up to {need} tokens (prompt and response) doesn't fit"
            yield Fault(flag, str(limit), reason, f"give at least {need}")


def one_reward(c: RunConfig) -> Iterator[Fault]:
    if c.rm_type is not None and c.custom_rm_path is not None:
        reason = f"two rewards: --rm-type {c.rm_type} is given as well"
        yield Fault("--custom-rm-path", c.custom_rm_path, reason, "leave one of the two out")
    elif not c.reward:
        yield Fault("--rm-type", "", "the run has no reward", "give --rm-type or --custom-rm-path")


def group_reward_is_whole(c: RunConfig) -> Iterator[Fault]:
    if c.group_rm and c.custom_rm_path is None and not c.trl_rewards:
        yield Fault("--group-rm", "true", "no built-in reward scores groups", "give --custom-rm-path")
    elif c.group_rm and c.group_failure_policy == "survivors":
        reason = "--group-rm compares all members of a group, survivors are not all"
        yield Fault("--group-failure-policy", "survivors", reason, "use --group-failure-policy drop")
    held_out = (("--eval-prompt-data", c.eval_prompt_data), ("--eval-baseline-data", c.eval_baseline_data))
    for flag, data in held_out:
        if c.group_rm and data is not None:
            reason = "--group-rm scores groups, evaluation scores single responses"
            yield Fault(flag, data, reason, "use --eval-config with a reward for each set")


def filter_is_on(c: RunConfig) -> Iterator[Fault]:
    if c.dynamic_sampling:
        return
    for flag, value, neutral in (
        ("--dynamic-sampling-filter-path", c.dynamic_sampling_filter_path, None),
        ("--on-all-filtered", c.on_all_filtered, "train"),
    ):
        if value != neutral:
            yield Fault(flag, str(value), "nothing is filtered", "give --dynamic-sampling")


def surplus_is_surplus(c: RunConfig) -> Iterator[Fault]:
    given, batch = c.over_sampling_batch_size, c.rollout_batch_size
    if given is None:
        return
    if given < batch:
        reason = f"fewer than --rollout-batch-size {batch}: no rollout could fill a batch"
        yield Fault("--over-sampling-batch-size", str(given), reason, f"give at least {batch}")
    elif c.schedule == "async":
        reason = "in --schedule async the slots are what is sampled beyond a batch"
        yield Fault("--over-sampling-batch-size", str(given), reason, "leave it out, or raise --max-lead")
    elif c.deterministic and given > batch:
        reason = "which groups are complete first depends on the clock"
        yield Fault("--over-sampling-batch-size", str(given), reason, "leave it out with --deterministic")


def partial_is_cut(c: RunConfig) -> Iterator[Fault]:
    sampled = c.over_sampling_batch_size
    if c.partial_rollout and (sampled is None or sampled <= c.rollout_batch_size):
        reason = "no group is cut without more groups in flight than a step trains"
        yield Fault("--partial-rollout", "", reason, "give --over-sampling-batch-size, or leave it out")
    if c.mask_offpolicy_in_partial_rollout and not c.partial_rollout:
        reason = "no response goes on in a later rollout"
        yield Fault("--mask-offpolicy-in-partial-rollout", "", reason, "give --partial-rollout")


def function_path_form(c: RunConfig) -> Iterator[Fault]:
    for flag, path in (
        ("--custom-rm-path", c.custom_rm_path),
        ("--custom-agent-path", c.custom_agent_path),
        *(("--trl-rewards", path) for path in c.trl_rewards),
        ("--custom-advantage-function-path", c.custom_advantage_function_path),
        ("--custom-loss-function-path", c.custom_loss_function_path),
    ):
        if path is None:
            continue
        place, _, function = path.rpartition(":") if ":" in path else path.rpartition(".")
        is_file = place.endswith(".py")
        if not function.isidentifier() or not (is_file or all(p.isidentifier() for p in place.split("."))):
            remedy = "write package.module.function or path/to/file.py:function"
            yield Fault(flag, path, "names no function", remedy)
        elif is_file and not file_exists(place):
            yield Fault(flag, path, f"there is no file {place}", "check the path")


def eval_mode_has_means(c: RunConfig) -> Iterator[Fault]:
    dedicated = c.eval_mode == "dedicated"
    if dedicated != (c.eval_model is not None):
        if dedicated:
            yield Fault("--eval-mode", "dedicated", "no engines only evaluate", "give --eval-model")
        else:
            reason = f"--eval-mode {c.eval_mode} asks no engines of their own"
            yield Fault("--eval-model", str(c.eval_model), reason, "give --eval-mode dedicated")
    if c.eval_mode != "shared" and not c.on_disk:
        reason = f"no version stays on disk with --update-weight-transport {c.update_weight_transport}"
        yield Fault("--eval-mode", c.eval_mode, reason, "use --update-weight-transport disk")


def eval_data_is_one(c: RunConfig) -> Iterator[Fault]:
    if c.eval_config is None:
        return
    for flag, value in (
        ("--eval-prompt-data", c.eval_prompt_data),
        ("--eval-sampled", c.eval_sampled or None),
    ):
        if value is not None:
            reason = "--eval-config names the data sets and their sampling"
            yield Fault(flag, str(value), reason, "leave one of the two out")


def eval_has_data(c: RunConfig) -> Iterator[Fault]:
    if c.eval_prompt_data is not None or c.eval_config is not None:
        return
    for flag, value, neutral in (
        ("--eval-interval", c.eval_interval, None),
        ("--eval-mode", c.eval_mode, "shared"),
        ("--eval-num-prompts", c.eval_num_prompts, None),
        ("--eval-max-response-len", c.eval_max_response_len, None),
        ("--eval-input-key", c.eval_input_key, None),
        ("--eval-label-key", c.eval_label_key, None),
        ("--n-samples-per-eval-prompt", c.n_samples_per_eval_prompt, 1),
    ):
        if value != neutral:
            yield Fault(flag, str(value), "there is nothing to evaluate on", "give --eval-prompt-data")


def eval_samples_differ(c: RunConfig) -> Iterator[Fault]:
    if c.n_samples_per_eval_prompt > 1 and c.eval_temperature == 0:
        reason = "at --eval-temperature 0 all samples of a prompt are equal"
        remedy = "give --eval-temperature above 0, or one sample"
        yield Fault("--n-samples-per-eval-prompt", str(c.n_samples_per_eval_prompt), reason, remedy)


def eval_is_held_out(c: RunConfig) -> Iterator[Fault]:
    if c.eval_prompt_data is not None and c.eval_prompt_data == c.prompt_data:
        reason = "the prompts that are trained are no held-out prompts"
        yield Fault("--eval-prompt-data", c.eval_prompt_data, reason, "give other prompts, or leave it out")


def learning_rate_plan(c: RunConfig) -> Iterator[Fault]:
    if c.lr_decay_style == "constant":
        if c.min_lr_ratio > 0:
            reason = "a constant learning rate has no end value"
            yield Fault(
                "--min-lr-ratio", f"{c.min_lr_ratio:g}", reason, "give --lr-decay-style linear or cosine"
            )
    elif c.num_rollout is None:
        reason = "the decay needs to know the number of steps"
        yield Fault("--lr-decay-style", c.lr_decay_style, reason, "give --num-rollout")
    if c.num_rollout is None or c.num_critic_only_steps >= c.num_rollout:  # which is told elsewhere
        return
    total = (c.num_rollout - c.num_critic_only_steps) * c.inner_steps
    if c.lr_warmup_iters >= total:
        reason = f"the policy has only {total} optimizer steps"
        yield Fault("--lr-warmup-iters", str(c.lr_warmup_iters), reason, f"give at most {total - 1}")


def wandb_is_there(c: RunConfig) -> Iterator[Fault]:
    given = (c.wandb_project, c.wandb_team, c.wandb_group, c.wandb_mode, c.wandb_dir)
    names = ("project", "team", "group", "mode", "dir")
    if c.use_wandb and importlib.util.find_spec("wandb") is None:
        yield Fault(
            "--use-wandb", "", "the package wandb is not installed", "`pip install wandb`, or leave it out"
        )
    if not c.use_wandb:
        for name, value in zip(names, given):
            if value is not None:
                yield Fault(f"--wandb-{name}", value, "nothing is reported to W&B", "give --use-wandb")


def _near_divisors(total: int, wanted: int) -> str:
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    below = [d for d in divisors if d < wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return ", ".join(str(d) for d in below + above)


def groups_fit(c: RunConfig) -> Iterator[Fault]:
    """The rules of engines, for each group of --sglang-config."""
    own = (step_holds_decodes, experts_are_divided, deterministic_threads)
    rules = (sequence_fits, *own, one_rank, seeds_count)
    yield from each_group(c, rules)
    updates = (quantised_engines, engine_applies_deltas, hook_has_a_reader, checkpoint_engine_can_run)
    yield from each_group(c, (*updates, update_policy_fits, stock_engines_are_alike), updated=True)


def sglang_faults(c: RunConfig) -> tuple[Fault, ...]:
    """What a run with these valid options asks that no SGLang does: external engines tell what they are only when
    they answer."""
    stock = c.model_copy(update={"engine": "sglang"})
    rules = (seeds_count, update_policy_fits, stock_engines_are_alike)
    return tuple(fault for rule in rules for fault in rule(stock))


CHECKS: tuple[Check, ...] = (
    *ENGINE_CHECKS,
    *SGLANG_CHECKS,
    *EXTERNAL_CHECKS,
    *TOPOLOGY_CHECKS,
    *COLOCATED_CHECKS,
    groups_fit,
    *ROUTER_CHECKS,
    *SCHEDULE_CHECKS,
    *WEIGHT_CHECKS,
    run_has_an_end,
    batch_divides,
    *ALGORITHM_CHECKS,
    *CRITIC_CHECKS,
    *IMITATION_CHECKS,
    survivors_fit,
    sampling_is_whole,
    prompt_leaves_room,
    response_range,
    sequence_fits,
    one_reward,
    *AGENT_CHECKS,
    group_reward_is_whole,
    filter_is_on,
    surplus_is_surplus,
    partial_is_cut,
    function_path_form,
    eval_mode_has_means,
    eval_data_is_one,
    eval_has_data,
    eval_samples_differ,
    eval_is_held_out,
    learning_rate_plan,
    wandb_is_there,
    *FILE_CHECKS,
    *DEBUG_CHECKS,
)
