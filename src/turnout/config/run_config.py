"""`RunConfig`: every option of a run in one flat, frozen record, and the values that follow from several options.

Owns the list of groups. Promises: a RunConfig made by `turnout.config.load` has passed every check; the derived
properties are the only place where "not given" turns into a number.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from turnout.config.estimators import ESTIMATORS
from turnout.config.groups.agents import AgentOptions
from turnout.config.groups.algorithm import (
    AlgorithmOptions,
    OffPolicyOptions,
    OptimizerOptions,
    TrainerOptions,
)
from turnout.config.groups.critic import CriticOptions
from turnout.config.groups.data import DataOptions, EvalOptions
from turnout.config.groups.debug import DebugOptions
from turnout.config.groups.engine import EngineOptions
from turnout.config.groups.external import ExternalOptions
from turnout.config.groups.imitation import ImitationOptions
from turnout.config.groups.model import ModelOptions
from turnout.config.groups.rollout import RewardOptions, RolloutOptions
from turnout.config.groups.router import RouterOptions
from turnout.config.groups.run import RunOptions, SeeingOptions
from turnout.config.groups.schedule import ScheduleOptions
from turnout.config.groups.topology import TopologyOptions
from turnout.config.groups.weights import WeightOptions
from turnout.config.option import Options, OptionSpec, read_specs
from turnout.config.server_groups import Group, Unsaid, groups_of
from turnout.core.slots import slots_for

GROUPS: tuple[type[Options], ...] = (
    ModelOptions,
    DataOptions,
    EvalOptions,
    RolloutOptions,
    AgentOptions,
    RewardOptions,
    ScheduleOptions,
    EngineOptions,
    TopologyOptions,
    ExternalOptions,
    RouterOptions,
    AlgorithmOptions,
    CriticOptions,
    ImitationOptions,
    OffPolicyOptions,
    OptimizerOptions,
    TrainerOptions,
    WeightOptions,
    RunOptions,
    SeeingOptions,
    DebugOptions,
)


class RunConfig(
    ModelOptions,
    DataOptions,
    EvalOptions,
    RolloutOptions,
    AgentOptions,
    RewardOptions,
    ScheduleOptions,
    EngineOptions,
    TopologyOptions,
    ExternalOptions,
    RouterOptions,
    AlgorithmOptions,
    CriticOptions,
    ImitationOptions,
    OffPolicyOptions,
    OptimizerOptions,
    TrainerOptions,
    WeightOptions,
    RunOptions,
    SeeingOptions,
    DebugOptions,
):
    """All options of one run."""

    @property
    def samples_per_rollout(self) -> int:
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def inner_steps(self) -> int:
        """Optimizer steps of one train step."""
        if self.num_steps_per_rollout is not None:
            return self.num_steps_per_rollout
        if self.global_batch_size is not None:
            return max(1, self.samples_per_rollout // self.global_batch_size)
        return 1

    @property
    def train_only(self) -> bool:
        """Whether batches come from files, and no engine is started."""
        return self.debug_train_only or self.load_debug_rollout_data is not None

    @property
    def optimizer_samples(self) -> int:
        """Samples of one optimizer step."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        return self.samples_per_rollout // self.inner_steps

    @property
    def fine_tunes(self) -> bool:
        """Whether the data gives the answers that are trained on."""
        return self.loss_type == "sft_loss"

    @property
    def asks_engines(self) -> bool:
        """Whether anything is sampled, so that there are engines."""
        return not self.fine_tunes or self.eval_prompt_data is not None or self.eval_config is not None

    @property
    def has_critic(self) -> bool:
        return ESTIMATORS[self.advantage_estimator].critic

    @property
    def reward(self) -> str:
        """The reward's name or path (`trl` for --trl-rewards); a reasoning-gym task and an agent bring their own,
        and where a teacher says what is good there need be `none`. Empty where it is lacking."""
        if self.rm_type is not None or self.custom_rm_path is not None:
            return self.rm_type or self.custom_rm_path or ""
        if self.trl_rewards:
            return "trl"
        if self.agent is not None:
            return "agent"
        if self.use_opd or self.fine_tunes:
            return "none"
        return "reasoning_gym" if self.prompt_data.startswith("reasoning_gym:") else ""

    @property
    def agent(self) -> str | None:
        """The agent that makes samples; tasks of verifiers bring theirs."""
        if self.custom_agent_path is None and self.prompt_data.startswith("verifiers:"):
            return "turnout.rollout.verifiers_env:agent"
        return self.custom_agent_path

    @property
    def min_group(self) -> int:
        """Fewest members with which a group may train when others failed."""
        return self.n_samples_per_prompt if self.group_failure_policy == "drop" else self.min_group_size

    @property
    def prompt_limit(self) -> int | None:
        """Longest prompt in tokens; None is no limit of ours."""
        if self.rollout_max_prompt_len is not None:
            return self.rollout_max_prompt_len
        return None if self.rollout_max_context_len is None else self.rollout_max_context_len - 1

    @property
    def weight_url(self) -> str | None:
        """The object store to which versions are copied; None where --update-weight-disk-dir is a folder."""
        given = self.update_weight_disk_dir
        return given if given is not None and "://" in given else None

    @property
    def weight_folder(self) -> str | None:
        """The folder of --update-weight-disk-dir; None where it is not given, or is an object store."""
        return None if self.weight_url is not None else self.update_weight_disk_dir

    @property
    def eval_response_limit(self) -> int:
        """Longest response in evaluation, in tokens."""
        given = self.eval_max_response_len
        return self.rollout_max_response_len if given is None else given

    @property
    def clip_range(self) -> tuple[float, float]:
        """Clip range of the probability ratio below and above 1."""
        low, high = ESTIMATORS[self.advantage_estimator].clip
        if self.eps_clip is not None:
            low = high = self.eps_clip
        return low, high if self.eps_clip_high is None else self.eps_clip_high

    @property
    def uses_reference(self) -> bool:
        """Whether log-probs of a frozen reference are needed."""
        return self.use_kl_loss or self.kl_coef > 0

    @property
    def eval_keys(self) -> tuple[str, str | None]:
        """Keys of prompt and label in held-out rows."""
        key = self.input_key if self.eval_input_key is None else self.eval_input_key
        return key, self.label_key if self.eval_label_key is None else self.eval_label_key

    @property
    def lead(self) -> int:
        """Train steps that rollouts may run ahead."""
        if self.schedule == "async":
            return self.max_staleness if self.max_lead is None else self.max_lead
        return self.update_weights_interval - (self.schedule == "sync")

    @property
    def lag_bound(self) -> int:
        """Greatest lag with which a token may train: what the lead allows, and --max-staleness keeps of it. What
        partial rollouts bring, only the latter bounds."""
        if self.fine_tunes:  # the data's answers are of no version
            return self.lead
        return self.max_staleness if self.partial_rollout else min(self.lead, self.max_staleness)

    @property
    def offloads_train(self) -> bool:
        """Whether the trainer gives its memory back between steps."""
        return self.offload or self.offload_train

    @property
    def offloads_rollout(self) -> bool:
        """Whether the engines give theirs back while it trains."""
        return self.offload or self.offload_rollout

    @property
    def groups(self) -> tuple[Group, ...]:
        """Every group of engines that the run starts, placeholders too; raises ConfigError where the file of
        --sglang-config is no good."""
        ranks = self.rollout_num_gpus_per_engine
        if self.external or not self.asks_engines:
            return ()
        if self.sglang_config is not None:
            unsaid = Unsaid(self.hf_checkpoint, ranks, self.engine)
            return groups_of(Path(self.sglang_config).expanduser().resolve(), unsaid)
        gpus = self.actor_gpus if self.rollout_num_gpus is None and self.colocate else self.rollout_num_gpus
        alike = 1 if gpus is None else gpus // ranks
        count = alike if self.rollout_num_engines is None else self.rollout_num_engines
        flag = "--rollout-num-engines"
        return (Group(flag, "engine", "default", "regular", count * ranks, ranks, self.engine, updated=True),)

    @property
    def external(self) -> bool:
        """Whether somebody else runs the engines."""
        return bool(self.rollout_external_engine_addrs) or self.rollout_external_engine_file is not None

    @property
    def frozen_models(self) -> dict[str, str]:
        """Where each model comes from that gets no weights of the trainer, by its name."""
        frozen = (group for group in self.groups if not group.updated)
        return {group.model: group.model_path or self.hf_checkpoint for group in frozen}

    @property
    def programs(self) -> set[str]:
        """The programs that serve in this run."""
        return {group.program for group in self.groups if group.engines}

    @property
    def updated_engines(self) -> int:
        """Engines that get the trainer's weights, those of --rollout-external-engine-file not counted."""
        if self.external:
            return len(self.rollout_external_engine_addrs)
        return sum(group.engines for group in self.groups if group.updated)

    @property
    def actor_gpus(self) -> int:
        """Devices of the trainer."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def ranks_in_cluster(self) -> bool:
        """Whether the trainer's ranks lie on nodes of a cluster. A trainer of one device is a thread here."""
        return self.cluster == "ray" and self.actor_gpus > 1 and not self.debug_rollout_only

    @property
    def rollout_gpus(self) -> int:
        """Devices of all engines, and those that placeholders keep free."""
        return sum(group.num_gpus for group in self.groups)

    @property
    def engines_needed(self) -> int:
        """How many engines the run can't do without."""
        if self.min_engines is not None:
            return self.min_engines
        if not self.asks_engines:
            return 0
        may_be_less = self.use_fault_tolerance or self.rollout_external_engine_file is not None
        fewest = 2 if self.in_halves else 1
        return fewest if may_be_less else self.updated_engines

    @property
    def in_halves(self) -> bool:
        """Whether the engines that get the trainer's weights are halves of PD pairs."""
        return any(group.updated and group.worker_type in ("prefill", "decode") for group in self.groups)

    @property
    def router_kind(self) -> str:
        """direct, smg or sglang-router."""
        if self.router is not None:
            return self.router
        own = "smg" if self.router_policy is not None or self.router_args else "direct"
        return own if self.sglang_router_ip is None else "sglang-router"

    @property
    def restarts(self) -> int:
        """How often in 10 minutes an engine is started again."""
        given = self.engine_restarts
        return (5 if self.use_fault_tolerance else 0) if given is None else given

    @property
    def update_retries(self) -> int:
        """How often an update that failed is tried again where rollouts wait for it."""
        if self.update_weight_retries is not None:
            return self.update_weight_retries
        return 2 if self.use_fault_tolerance else 0

    @property
    def followed(self) -> bool:
        """Whether followers bring versions to the engines."""
        return self.update_weight_transport == "follower"

    @property
    def on_disk(self) -> bool:
        """Whether versions lie in folders."""
        return self.followed or self.update_weight_transport == "disk"

    @property
    def drains(self) -> bool:
        """Whether requests in flight are waited for before the weights change."""
        return self.weight_update_policy == "drain"

    @property
    def weight_update_policy(self) -> str:
        """What becomes of requests in flight when the weights change."""
        if self.on_weight_update is not None:
            return self.on_weight_update
        return "retract" if self.schedule == "async" and not self.deterministic else "drain"

    @property
    def window(self) -> int:
        """W of turnout.core.slots."""
        if self.surplus:  # all groups of a version may be complete before the slowest
            return max(1, self.lead) * self.rollout_batch_size + 1
        if self.schedule != "async" or self.deterministic:
            return 1
        half = max(1, self.rollout_batch_size // 2) if self.lead > self.max_engine_lag else 1
        return half if self.rollout_window is None else self.rollout_window

    @property
    def most_slots(self) -> int:
        """The most slots that keep the lead."""
        return slots_for(self.lead, self.window, self.rollout_batch_size, self.max_engine_lag)

    @property
    def slots(self) -> int:
        """B of turnout.core.slots."""
        if self.surplus:
            return (self.lead + 1) * self.rollout_batch_size + self.surplus
        return self.most_slots if self.rollout_slots is None else self.rollout_slots

    @property
    def surplus(self) -> int:
        """Groups that are sampled beyond a batch."""
        sampled = self.over_sampling_batch_size
        return 0 if sampled is None else sampled - self.rollout_batch_size

    @property
    def encoding(self) -> str:
        """The encoding of deltas on disk."""
        return "packed" if self.update_weight_encoding is None else self.update_weight_encoding

    def engine_thread_count(self, cpus: int) -> int:
        """Threads of each rank of an engine on a machine with `cpus` CPUs."""
        ranks = sum(group.engines * group.ranks for group in self.groups)
        return max(1, cpus // max(1, ranks)) if self.engine_threads is None else self.engine_threads

    def trainer_thread_count(self, cpus: int) -> int:
        """Threads of each rank of the trainer on a machine with `cpus` CPUs."""
        ranks = self.actor_num_gpus_per_node  # on one of its machines, which are taken to be alike
        return max(1, cpus // ranks) if self.trainer_threads is None else self.trainer_threads


@cache
def specs() -> dict[str, OptionSpec]:
    """Every option by YAML key, in the order of the reference page."""
    return {spec.name: spec for spec in read_specs(GROUPS)}
