"""From the configuration to the settings of each part. Pure: nothing is started or opened here."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from math import inf
from pathlib import Path

from turnout.config.run_config import RunConfig
from turnout.core.errors import ConfigError, Fault
from turnout.core.imports import load_function
from turnout.core.ports import Clock
from turnout.protocol.sglang import SamplingParams
from turnout.rollout.admission import Admission, AdmissionPlan
from turnout.rollout.agent import Agent, AgentRuns, load_agent
from turnout.rollout.episode import Generate, Turns
from turnout.rollout.filters import FilterPlan, load_filter, of_no_variance
from turnout.rollout.line import QUEUED
from turnout.rollout.pool_plan import CollectLimits, PoolPlan
from turnout.rollout.prompts import DataSpec
from turnout.rollout.rewards import RewardRunner, load_reward
from turnout.rollout.sampler import Routes, Sampler
from turnout.rollout.spread import endless
from turnout.rollout.staleness import Fate, StalenessPolicy
from turnout.rollout.tokenizer import TokenizerLike
from turnout.rollout.trl_rewards import load_trl_rewards
from turnout.rollout.worker import Samples, SamplingPlan
from turnout.schedule.checkpoints import SavePlan
from turnout.schedule.engine_lives import Care, Probes
from turnout.schedule.external import external_access
from turnout.schedule.parts import UpdatePatience
from turnout.schedule.roster import actor_model, roster
from turnout.schedule.run_router import RouterPlan
from turnout.serving.address import parse_address
from turnout.serving.launcher import EngineLaunch
from turnout.serving.models import Models
from turnout.serving.roster import EnginePlan, WorkerType, sides
from turnout.serving.router_launcher import RouterLaunch
from turnout.serving.sglang_launcher import SglangLaunch
from turnout.transfer.fleet import Fleet
from turnout.transfer.updater import UpdatePolicy

PAIR_S = 120.0
log = logging.getLogger(__name__)


def engine_launch(
    config: RunConfig, plan: EnginePlan, model: Path, folders: tuple[Path, Path]
) -> EngineLaunch:
    """One embedded engine; `folders` are its log folder and the weight directory that it may read."""
    logs, weights = folders
    overrides = {name.replace("_", "-"): value for name, value in plan.overrides.items()}
    threads = overrides.get("threads", config.engine_thread_count(cpu_count()))
    flags = {
        "--model-path": model,
        "--engine-id": plan.engine_id,
        "--dtype": config.dtype,
        "--threads": threads,
        "--tp-size": plan.ranks,
        "--ep-size": config.engine_expert_parallel_size,
        "--max-total-tokens": config.engine_max_total_tokens,
        "--max-running-requests": config.engine_max_running_requests,
        "--max-step-tokens": config.engine_step_tokens,
        "--row-block": config.engine_row_block,
        "--quantization": config.engine_quantization,
        "--request-timeout-s": config.rollout_request_timeout_s,
        "--allowed-root": weights.resolve(),
        "--digest-audit-interval": config.digest_audit_interval,
        "--linger-s": config.engine_linger,
    }
    if plan.worker_type is not WorkerType.REGULAR:
        flags |= {
            "--disaggregation-mode": plan.worker_type.value,
            "--disaggregation-timeout-s": pair_patience(config),
        }
    if config.rollout_max_context_len is not None:
        flags["--context-length"] = config.rollout_max_context_len
    if config.custom_update_weight_pre_read_path is not None:
        flags["--custom-update-weight-pre-read-path"] = config.custom_update_weight_pre_read_path
    flags |= {f"--{name}": value for name, value in overrides.items()}
    return EngineLaunch(
        engine_id=plan.engine_id,
        arguments=(*(str(word) for pair in flags.items() for word in pair), "--incremental-streaming-output"),
        threads=threads,
        folder=logs,
        start_deadline_s=config.engine_start_timeout_s,
        token=admin_token(config),
        ranks=plan.ranks,
    )


def pair_patience(config: RunConfig) -> float:
    """Seconds of each wait of one half of a PD pair for the other: a sample has time for another pair after it."""
    return min(PAIR_S, config.rollout_request_timeout_s / 3)


def sglang_launch(config: RunConfig, plan: EnginePlan, model: Path, logs: Path) -> SglangLaunch:
    """One SGLang server. On GPUs each has its own; on a CPU its cache has the size of an embedded engine's."""
    arguments: dict[str, object] = {
        "context-length": config.rollout_max_context_len,
        "incremental-streaming-output": True,
    }
    if config.sglang_device == "cpu":
        arguments["max-total-tokens"] = config.engine_max_total_tokens
        arguments["max-running-requests"] = config.engine_max_running_requests
    else:
        arguments["base-gpu-id"] = plan.devices[0] if plan.devices else 0
    if config.use_rollout_routing_replay:
        arguments["enable-return-routed-experts"] = True
    if plan.worker_type is not WorkerType.REGULAR:
        arguments["disaggregation-mode"] = plan.worker_type.value
    given = {
        name.replace("_", "-"): value
        for name, value in (*config.sglang_args.items(), *plan.overrides.items())
    }
    return SglangLaunch(
        engine_id=plan.engine_id,
        python=Path(config.sglang_python if config.sglang_python is not None else sys.executable),
        model=model.resolve(),
        dtype=config.dtype,
        folder=logs,
        start_deadline_s=config.engine_start_timeout_s,
        device=config.sglang_device,
        threads=config.engine_thread_count(cpu_count()),
        arguments={**arguments, **given},
        key=admin_token(config),
        ranks=plan.ranks,
    )


def update_policy(config: RunConfig) -> UpdatePolicy:
    """What an update may do without."""
    needed, lag = config.engines_needed, config.max_engine_lag
    return UpdatePolicy(needed, lag, config.trust_label, config.drains, config.followed)


def request_room(config: RunConfig, engines: Callable[[], Sequence[EnginePlan]]) -> Callable[[], float]:
    """How many requests these engines may have been sent (turnout.rollout.line). As many as there are where nobody
    said how many an SGLang runs at once, and in deterministic mode, where no load may choose an engine."""
    if config.deterministic:
        return endless
    alike, known, total = config.engine_max_running_requests, engines(), 0.0

    def counted() -> float:
        return QUEUED * sum(alike if plan.running is None else plan.running for plan in known)

    def room() -> float:
        nonlocal known, total
        if (now := engines()) is not known:  # asked for every request, changed by few events
            known = now
            total = counted()
        return total

    total = counted()
    if total == inf:
        log.info(
            "requests are sent in order of their groups, but all at once: give max-running-requests in "
            "--sglang-args to have the groups of the next step generated first"
        )
    return room


def routes(config: RunConfig, fleet: Fleet) -> Routes:
    """Which engines samples may ask, and how many at once."""
    room = request_room(config, fleet.answering)
    return Routes(fleet.routable, fleet.standing, fleet.changed, room, fleet.prefills)


def router_of(config: RunConfig, run_id: str, logs: Path) -> RouterPlan | None:
    """The router of the run's own model; None: the run chooses engines itself."""
    if config.router_kind == "direct":
        return None
    host, port, access = config.sglang_router_ip, config.sglang_router_port, external_access(config)
    if host is not None and port is not None:
        text = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
        return RouterPlan("router", run_id, None, parse_address(text, "--sglang-router-ip"), access)
    policy = "manual" if config.router_policy is None else config.router_policy
    timeout_s = config.rollout_request_timeout_s
    pairs = bool(sides(plan for plan in roster(config) if plan.updated))
    launch = RouterLaunch("router", config.router_kind, policy, config.router_args, timeout_s, logs, pairs)
    return RouterPlan("router", run_id, launch, access=access)


def samples(config: RunConfig, sampler: Sampler, tokenizer: TokenizerLike) -> Samples:
    """Who makes samples: the sampler, or a function of several turns on top of it. Raises ConfigError."""
    agent, generate = agent_function(config), generate_function(config)
    if agent is not None:
        generate = AgentRuns(agent, tokenizer, train_data(config), config.agent_tool_parser).generate
    if generate is None:
        return sampler
    return Turns(sampler, generate, tokenizer, config.rollout_max_turns)


def agent_function(config: RunConfig) -> Agent | None:
    """The run's agent; raises ConfigError for one that cannot be loaded."""
    return None if config.agent is None else load_agent(config.agent)


def generate_function(config: RunConfig) -> Generate | None:
    """The run's own function for samples; raises ConfigError for one that cannot be loaded."""
    path = config.custom_generate_function_path
    return None if path is None else load_function("--custom-generate-function-path", path)


def update_patience(config: RunConfig, up: Callable[[], Iterable[str]]) -> UpdatePatience:
    """`up`: the ids of engines that run."""
    return UpdatePatience(
        config.update_weight_timeout_s, config.update_retries, up, config.engine_start_timeout_s
    )


def engine_care(config: RunConfig) -> Care:
    """How the run's engines are watched and started again."""
    probes = Probes(
        config.rollout_health_check_interval,
        config.rollout_health_check_timeout,
        first_wait_s=config.rollout_health_check_first_wait,
    )
    models: dict[str, list[EnginePlan]] = {}
    for plan in roster(config):
        models.setdefault(plan.model, []).append(plan)
    models.pop(str(config.eval_model), None)  # what it has no engine for is told as left out
    spare = config.min_engines is not None or config.use_fault_tolerance
    needed = {name: (1 if spare else len(plans), sides(plans)) for name, plans in models.items()}
    return Care(probes, config.restarts, needed | {actor_model(config): (config.engines_needed, ())})


def save_plan(config: RunConfig, folder: Path, model: Path) -> SavePlan:
    """`folder` is where checkpoints go, `model` has config and tokenizer for the export."""
    trains = not config.debug_rollout_only
    return SavePlan(
        folder,
        trains and (config.save is not None or config.save_interval is not None),
        config.save_interval,
        Path(config.save_hf) if config.save_hf is not None and trains else None,
        model,
        config.update_weight_buffer_size,
    )


def staleness_policy(config: RunConfig) -> StalenessPolicy:
    most = config.lead if config.fine_tunes else config.max_staleness
    return StalenessPolicy(most, Fate(config.staleness_policy), config.min_unmasked_share)


def train_data(config: RunConfig) -> DataSpec:
    return data(config, config.prompt_data, (config.input_key, config.label_key))


def rollout_plan(config: RunConfig) -> SamplingPlan:
    params = SamplingParams(
        max_new_tokens=config.rollout_max_response_len,
        temperature=config.rollout_temperature,
        stop=tuple(config.rollout_stop),
        stop_token_ids=tuple(config.rollout_stop_token_ids),
        min_new_tokens=config.rollout_min_response_len,
        ignore_eos=config.rollout_min_response_len >= config.rollout_max_response_len,
    )
    return SamplingPlan(
        config.n_samples_per_prompt,
        params,
        config.rollout_request_timeout_s,
        config.min_group,
        config.rollout_max_context_len,
        config.mask_offpolicy_in_partial_rollout,
        mask_kv_mixed=config.mask_kv_mixed,
        routed=config.use_rollout_routing_replay,
    )


def pool_plan(config: RunConfig, steps: int | None) -> PoolPlan:
    return PoolPlan(
        per_step=config.rollout_batch_size,
        slots=config.slots,
        window=config.window,
        steps=steps,
        sampling=rollout_plan(config),
        limits=CollectLimits(config.max_failed_groups, filter_plan(config)),
        deadline_s=config.rollout_timeout_s,
        surplus=config.surplus,
        beside=config.schedule == "pipelined",
        partial=config.partial_rollout,
        last_batch=config.last_batch,
        deterministic=config.deterministic,
    )


def admission(config: RunConfig) -> Admission | None:
    """What limits the groups in flight besides the slots; None: nothing."""
    most, high = config.rollout_max_concurrency, config.kv_high_watermark
    if most is None and high is None:
        return None
    most = config.slots if most is None else most
    full = 1.0 if high is None else high
    return Admission(AdmissionPlan(most, config.rollout_batch_size, config.max_staleness, full))


def reward_runner(config: RunConfig, clock: Clock, models: Models | None = None) -> RewardRunner:
    """The run's reward, which may ask these models; raises ConfigError for one that cannot be loaded."""
    if config.trl_rewards:
        reward = load_trl_rewards(config.trl_rewards, (config.input_key, config.eval_keys[0]))
    else:
        reward = load_reward(config.reward)
    runner = RewardRunner(reward, clock, config.reward_timeout_s, whole=config.group_rm)
    runner.models = Models({}) if models is None else models
    return runner


def filter_plan(config: RunConfig) -> FilterPlan:
    """Dynamic sampling; raises ConfigError for a filter that cannot be loaded."""
    waves, path = config.dynamic_sampling_max_waves, config.dynamic_sampling_filter_path
    limit = waves * config.rollout_batch_size
    if not config.dynamic_sampling:
        return FilterPlan(limit=limit)
    reject = of_no_variance if path is None else load_filter(path)
    return FilterPlan(reject, limit, config.on_all_filtered, waves)


def cpu_count() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def data(config: RunConfig, path: str, keys: tuple[str, str | None]) -> DataSpec:
    return DataSpec(
        path=path,
        input_key=keys[0],
        label_key=keys[1],
        metadata_key=config.metadata_key,
        tool_key=config.tool_key,
        apply_chat_template=config.apply_chat_template,
        chat_template_kwargs=config.apply_chat_template_kwargs,
        max_prompt_tokens=config.prompt_limit,
        columns=bool(config.trl_rewards) or config.agent is not None,
        agent=config.agent is not None,
    )


def admin_token(config: RunConfig) -> str | None:
    """What control calls carry; raises ConfigError where its variable is not set."""
    if config.admin_token_env is None:
        return None
    token = os.environ.get(config.admin_token_env)
    if not token:
        raise ConfigError(
            Fault("--admin-token-env", config.admin_token_env, "the variable is not set", "export it")
        )
    return token
