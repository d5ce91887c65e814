"""What must hold between groups of engines, devices and the other options. Rules as in turnout.config.checks.

Promises: a fault of a group names its file, its model and its place in it; the rules of engines hold for each group
with its own values (`each_group`), and a fault that is the run's own is told once, as that of the run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import ValidationError

from turnout.config.check_files import is_file
from turnout.config.check_sglang import argument_faults
from turnout.config.groups.engine import EngineOptions
from turnout.config.groups.rollout import RolloutOptions
from turnout.config.groups.weights import WeightOptions
from turnout.config.option import Options
from turnout.config.reasons import fault_of, shown
from turnout.config.run_config import RunConfig, specs
from turnout.config.server_groups import Group, divisors, too_many, unknown_keys
from turnout.core.errors import ConfigError, Fault

Rule = Callable[[RunConfig], Iterator[Fault]]

# What `overrides` of an embedded engine may say: its option there -> the run's.
OVERRIDES: dict[str, tuple[type[Options], str]] = {
    "max_total_tokens": (EngineOptions, "engine_max_total_tokens"),
    "max_running_requests": (EngineOptions, "engine_max_running_requests"),
    "max_step_tokens": (EngineOptions, "engine_step_tokens"),
    "row_block": (EngineOptions, "engine_row_block"),
    "ep_size": (EngineOptions, "engine_expert_parallel_size"),
    "quantization": (EngineOptions, "engine_quantization"),
    "threads": (EngineOptions, "engine_threads"),
    "context_length": (RolloutOptions, "rollout_max_context_len"),
    "request_timeout_s": (RolloutOptions, "rollout_request_timeout_s"),
    "digest_audit_interval": (WeightOptions, "digest_audit_interval"),
}
# Options of an embedded engine that follow from something else, and from what.
GIVEN_ELSEWHERE = {
    "model_path": "model_path of the model",
    "tp_size": "num_gpus_per_engine",
    "dtype": "--dtype",
    "disaggregation_mode": "worker_type",
}


def file_is_good(c: RunConfig) -> Iterator[Fault]:
    if c.sglang_config is not None and not is_file(c.sglang_config):
        yield Fault("--sglang-config", c.sglang_config, "no such file", "give a .yaml or .json file")
        return
    try:
        _ = c.groups
    except ConfigError as error:
        yield from error.faults


def one_way_to_say_it(c: RunConfig) -> Iterator[Fault]:
    engines, gpus, ranks = c.rollout_num_engines, c.rollout_num_gpus, c.rollout_num_gpus_per_engine
    if c.sglang_config is not None:
        if engines is not None:
            reason = "--sglang-config says which engines there are"
            yield Fault("--rollout-num-engines", str(engines), reason, "leave one of the two out")
    elif gpus == 0 and not c.external:
        remedy = "leave it out, or give as many as the engines need"
        yield Fault("--rollout-num-gpus", "0", "without engines nothing is sampled", remedy)
    elif gpus is not None and gpus % ranks:
        reason = f"--rollout-num-gpus-per-engine {ranks} does not divide it"
        yield Fault("--rollout-num-gpus", str(gpus), reason, f"per engine fit: {divisors(gpus)}")
    elif gpus is not None and engines is not None and engines * ranks != gpus:
        reason = (
            f"--rollout-num-engines {engines} x --rollout-num-gpus-per-engine {ranks} is {engines * ranks}"
        )
        yield Fault("--rollout-num-gpus", str(gpus), reason, "leave one of the two out")
    elif gpus is None and engines is None and c.colocate and c.actor_gpus % ranks:
        reason = (
            f"does not divide the {c.actor_gpus} devices of the trainer, which --colocate gives the engines"
        )
        yield Fault("--rollout-num-gpus-per-engine", str(ranks), reason, "give --rollout-num-gpus")


def sums_agree(c: RunConfig) -> Iterator[Fault]:
    """The groups of a file, placeholders too, have exactly --rollout-num-gpus, where that is given."""
    given = c.rollout_num_gpus
    if c.sglang_config is None or given is None or given == c.rollout_gpus:
        return
    found = list(too_many(c.groups, given))
    yield from found
    if not found:
        reason = f"the groups of {c.sglang_config} have {c.rollout_gpus} devices, placeholders among them"
        remedy = "give that number, leave it out, or add a placeholder"
        yield Fault("--rollout-num-gpus", str(given), reason, remedy)


def engines_are_whole(c: RunConfig) -> Iterator[Fault]:
    for group in c.groups if c.sglang_config is not None else ():
        if group.worker_type != "placeholder" and group.num_gpus % group.ranks:
            reason = f"num_gpus_per_engine {group.ranks} does not divide it"
            remedy = f"per engine fit: {divisors(group.num_gpus)}"
            yield Fault(group.place, f"num_gpus {group.num_gpus}", reason, remedy)


def halves_are_whole(c: RunConfig) -> Iterator[Fault]:
    for model, groups in _models(c).items():
        halves = {group.worker_type for group in groups} - {"placeholder"}
        place = groups[0].place.rpartition(", ")[0]
        if "regular" in halves and len(halves) > 1:
            first = next(group for group in groups if group.worker_type == "regular")
            reason = f"model {model} has groups of prefill or decode as well, and a request takes one way"
            yield Fault(first.place, "", reason, "make it two models, or groups of one kind")
        elif len(halves) == 1 and not halves <= {"regular"}:
            (one,) = halves
            other = "decode" if one == "prefill" else "prefill"
            reason = f"has groups of {one} and none of {other}"
            yield Fault(place, "", reason, f"add a group with worker_type: {other}")
        elif not halves:
            yield Fault(place, "", "has no engines", "add a group, or leave the model out")


def replay_is_told(c: RunConfig) -> Iterator[Fault]:
    if c.use_rollout_routing_replay and c.in_halves:
        reason = "halves of a pair do not tell which experts they took"
        yield Fault("--use-rollout-routing-replay", "true", reason, "use groups of worker_type regular")


def one_model_learns(c: RunConfig) -> Iterator[Fault]:
    """A run trains one model, which is that of --hf-checkpoint."""
    if c.sglang_config is None:
        return
    learning = [model for model, groups in _models(c).items() if groups[0].updated]
    if len(learning) != 1:
        reason = f"one model gets the trainer's weights, here {', '.join(learning) if learning else 'none'}"
        remedy = (
            "say update_weights: false of the others" if learning else "leave model_path out of one model"
        )
        yield Fault(c.sglang_config, "update_weights", reason, remedy)
    for group in c.groups:
        if group.updated and group.model_path is not None:
            reason = f"its engines begin with the weights of --hf-checkpoint {c.hf_checkpoint}"
            yield Fault(group.place, f"model_path {group.model_path}", reason, "leave model_path out")
            return


def overrides_are_known(c: RunConfig) -> Iterator[Fault]:
    for group in c.groups if c.sglang_config is not None else ():
        if group.program == "sglang":
            yield from argument_faults(f"{group.place}: overrides", group.overrides)
            continue
        for name, value in group.overrides.items():
            plain = name.replace("-", "_")
            if plain == "context_length" and group.updated:
                reason = "a request may go to any engine of the model that is trained"
                yield Fault(f"{group.place}: overrides", name, reason, "give --rollout-max-context-len")
            elif plain in OVERRIDES:
                yield from _value_faults(f"{group.place}: overrides.{name}", OVERRIDES[plain], value)
            elif plain in GIVEN_ELSEWHERE:
                reason = f"{plain} follows from another value"
                yield Fault(f"{group.place}: overrides", name, reason, f"give {GIVEN_ELSEWHERE[plain]}")
            else:
                yield from unknown_keys(f"{group.place}: overrides", [plain], OVERRIDES)


def halves_run(c: RunConfig) -> Iterator[Fault]:
    for group in c.groups:
        if group.worker_type in ("prefill", "decode") and group.program == "embedded" and group.ranks > 1:
            reason = "half of a pair is not served over several ranks"
            yield Fault(group.place, f"num_gpus_per_engine {group.ranks}", reason, "give 1")


def halves_are_updated(c: RunConfig) -> Iterator[Fault]:
    for group in c.groups:
        if group.worker_type in ("prefill", "decode") and not group.updated:
            reason = "not yet done: prefill and decode apart of a model that is not updated"
            yield Fault(group.place, "", reason, "give worker_type: regular")


def both_halves_are_needed(c: RunConfig) -> Iterator[Fault]:
    if c.min_engines == 1 and c.in_halves:
        reason = "half of a pair answers nothing: one engine of each half is needed"
        yield Fault("--min-engines", "1", reason, "give at least 2")


def trainer_has_its_machines(c: RunConfig) -> Iterator[Fault]:
    if c.actor_num_nodes > 1 and c.cluster != "ray":
        reason = "all processes of --cluster local are on this machine"
        remedy = "give --cluster ray, or 1 and all of its devices in --actor-num-gpus-per-node"
        yield Fault("--actor-num-nodes", str(c.actor_num_nodes), reason, remedy)


def trainer_is_divided(c: RunConfig) -> Iterator[Fault]:
    size = c.tensor_model_parallel_size
    if c.actor_gpus % size:
        reason = f"does not divide the {c.actor_gpus} devices of the trainer"
        yield Fault("--tensor-model-parallel-size", str(size), reason, f"fit: {divisors(c.actor_gpus)}")
    experts = c.expert_model_parallel_size
    if c.actor_gpus % experts:
        reason = f"does not divide the {c.actor_gpus} devices of the trainer"
        yield Fault("--expert-model-parallel-size", str(experts), reason, f"fit: {divisors(c.actor_gpus)}")


def one_machine(c: RunConfig) -> Iterator[Fault]:
    """All processes of a local run are here, and a run of one half needs the devices of that; in a cluster a place
    is on one machine."""
    actor, rollout = 0 if c.debug_rollout_only else c.actor_gpus, 0 if c.train_only else c.rollout_gpus
    needed = max(actor, rollout) if c.colocate else actor + rollout
    most = c.num_gpus_per_node
    if most is None:
        return
    if c.cluster == "ray":
        largest = max([c.actor_num_gpus_per_node, *(group.ranks for group in c.groups if group.engines)])
        if largest > most:
            reason = f"the ranks of an engine, and those of a node of the trainer, lie on one: {largest}"
            yield Fault("--num-gpus-per-node", str(most), reason, f"give {largest}, or smaller engines")
    elif needed > most:
        both = f"the trainer has {actor} and the engines {rollout}"
        shared = "shared" if c.colocate else "each their own"
        reason = f"--cluster local is one machine; {needed} devices are needed ({both}, {shared})"
        remedy = f"give {needed}, fewer engines, or --cluster ray"
        yield Fault("--num-gpus-per-node", str(most), reason, remedy)


def each_group(c: RunConfig, rules: tuple[Rule, ...], updated: bool = False) -> Iterator[Fault]:
    """The faults that `rules` see in a group of the file, taken as the only one of the run; with `updated` only in
    those that get the trainer's weights."""
    if c.sglang_config is None:
        return
    for rule in rules:
        own = list(rule(c))
        for group in c.groups:
            if not group.engines or (updated and not group.updated):
                continue
            for fault in rule(c.model_copy(update=as_options(c, group))):
                if fault not in own:
                    yield Fault(f"{group.place}: {fault.where}", fault.value, fault.reason, fault.remedy)


def as_options(c: RunConfig, group: Group) -> dict[str, Any]:
    """What the options would be of a run whose engines are those of the group."""
    changed: dict[str, Any] = {
        "sglang_config": None,
        "rollout_num_engines": group.engines,
        "rollout_num_gpus_per_engine": group.ranks,
        "engine": group.program,
    }
    if group.program == "sglang":
        return changed | {"sglang_args": c.sglang_args | dict(group.overrides)}
    for name, value in group.overrides.items():
        option = OVERRIDES.get(name.replace("-", "_"))
        if option is not None and not list(_value_faults("", option, value)):
            changed[option[1]] = value
    return changed


def _models(c: RunConfig) -> dict[str, list[Group]]:
    """The groups of each model of the file."""
    found: dict[str, list[Group]] = {}
    for group in c.groups if c.sglang_config is not None else ():
        found.setdefault(group.model, []).append(group)
    return found


def _value_faults(place: str, option: tuple[type[Options], str], value: Any) -> Iterator[Fault]:
    schema, name = option
    if value is None:
        yield Fault(place, shown(value), "is empty", "leave it out")
        return
    try:
        schema.model_validate({name: value})
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            yield fault_of(detail, specs()[name], place)


def ray_has_processes(c: RunConfig) -> Iterator[Fault]:
    if c.cluster != "ray":
        if c.ray_address is not None:
            yield Fault("--ray-address", c.ray_address, "nothing lies in a Ray cluster", "give --cluster ray")
    elif c.train_only:
        reason = "a run that trains on saved batches alone is on this machine"
        yield Fault("--cluster", "ray", reason, "leave it out")
    elif c.external and not c.ranks_in_cluster:
        reason = "external engines lie where somebody else put them, and a trainer of one device is here"
        yield Fault("--cluster", "ray", reason, "leave it out, or give the trainer several devices")
    elif c.colocate:
        reason = "engines that share the trainer's devices are on its machine"
        yield Fault("--cluster", "ray", reason, "leave one of it and --colocate out")
    elif c.engine_linger:
        reason = "an engine ends with its actor, and that with the controller"
        yield Fault("--engine-linger", f"{c.engine_linger:g}", reason, "leave it out")


def ray_reaches_them(c: RunConfig) -> Iterator[Fault]:
    """An engine lies on any node, and sees there the devices that Ray gives its actor."""
    if c.cluster != "ray":
        return
    if "sglang" in c.programs and c.sglang_device == "cuda":
        reason = (
            "not yet done: SGLang on GPUs in a Ray cluster, where nothing keeps the trainer's GPUs for it"
        )
        yield Fault(
            "--cluster", "ray", reason, "use --cluster local, --engine embedded or --sglang-device cpu"
        )
    if c.update_weight_transport == "tensor":
        reason = "an engine may lie on another node, and share no memory with the controller"
        remedy = "use --update-weight-transport disk or group"
        yield Fault("--update-weight-transport", "tensor", reason, remedy)


def data_have_a_way(c: RunConfig) -> Iterator[Fault]:
    if c.rollout_data_transport == "nixl":
        lacks = importlib.util.find_spec("nixl") is None
        reason = "the library nixl is not installed" if lacks else "data go to the trainer's ranks without it"
        yield Fault(
            "--rollout-data-transport", "nixl", reason, "give local, or object-store in a Ray cluster"
        )
    elif c.rollout_data_transport == "object-store" and c.cluster != "ray":
        reason = "the object store is that of a Ray cluster"
        yield Fault("--rollout-data-transport", "object-store", reason, "give --cluster ray, or leave it out")
    elif c.rollout_data_transport == "local" and c.ranks_in_cluster:
        reason = "a rank of the trainer may lie on another node, and share no memory with the controller"
        yield Fault("--rollout-data-transport", "local", reason, "leave it out, or give object-store")


TOPOLOGY_CHECKS: tuple[Rule, ...] = (
    file_is_good,
    one_way_to_say_it,
    sums_agree,
    engines_are_whole,
    halves_are_whole,
    replay_is_told,
    one_model_learns,
    overrides_are_known,
    halves_run,
    ray_has_processes,
    ray_reaches_them,
    data_have_a_way,
    halves_are_updated,
    both_halves_are_needed,
    trainer_has_its_machines,
    trainer_is_divided,
    one_machine,
)
