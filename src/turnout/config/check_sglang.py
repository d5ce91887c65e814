"""What must hold between the options of a stock SGLang engine and the others. Rules as in turnout.config.checks."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from turnout.config.run_config import RunConfig, specs
from turnout.config.sglang_arguments import arguments_of, package_of
from turnout.core.errors import Fault

# Options of SGLang that follow from ours, and what to give instead.
GIVEN_ELSEWHERE = {
    "model-path": "--hf-checkpoint",
    "model": "--hf-checkpoint",
    "dtype": "--dtype",
    "device": "--sglang-device",
    "context-length": "--rollout-max-context-len",
    "api-key": "--admin-token-env",
    "admin-api-key": "--admin-token-env",
    "host": "nothing: engines listen on loopback",
    "port": "nothing: a free port is chosen",
    "disaggregation-mode": "worker_type in the file of --sglang-config",
    "disaggregation-bootstrap-port": "nothing: a free port is chosen",
    "config": "its options one by one",
    "base-gpu-id": "nothing: devices are laid out by --rollout-num-gpus or --sglang-config",
    "gpu-id-step": "nothing: devices are laid out by --rollout-num-gpus or --sglang-config",
    "nnodes": "nothing: all processes of a run are on one machine",
    "node-rank": "nothing: all processes of a run are on one machine",
}


def only_with_sglang(c: RunConfig) -> Iterator[Fault]:
    if "sglang" in c.programs:
        return
    for name, value in (
        ("sglang_python", c.sglang_python),
        ("sglang_device", c.sglang_device),
        ("sglang_args", c.sglang_args),
    ):
        if value != specs()[name].default:
            reason = "the embedded engine has no use for it"
            yield Fault(specs()[name].flag, str(value), reason, "give --engine sglang")


def only_with_embedded(c: RunConfig) -> Iterator[Fault]:
    """SGLang forms its steps itself; on a GPU it also sizes its cache from the memory that it finds."""
    if "embedded" in c.programs:
        return
    options: list[tuple[str, object]] = [
        ("engine_step_tokens", c.engine_step_tokens),
        ("engine_row_block", c.engine_row_block),
        ("engine_expert_parallel_size", c.engine_expert_parallel_size),
        ("engine_quantization", c.engine_quantization),
    ]
    if c.sglang_device == "cuda":
        options.append(("engine_max_total_tokens", c.engine_max_total_tokens))
        options.append(("engine_max_running_requests", c.engine_max_running_requests))
    for name, value in options:
        if value != specs()[name].default:
            reason = "an option of the embedded engine; SGLang chooses for itself"
            yield Fault(specs()[name].flag, str(value), reason, "leave it out, or give --sglang-args")


def arguments_are_free(c: RunConfig) -> Iterator[Fault]:
    yield from argument_faults("--sglang-args", c.sglang_args)


def arguments_are_known(c: RunConfig) -> Iterator[Fault]:
    """Against the list of the SGLang that would be started, where it is on this machine."""
    given = {"--sglang-args": c.sglang_args} if c.engine == "sglang" else {}
    for group in c.groups if c.sglang_config is not None else ():
        if group.program == "sglang":
            given[f"{group.place}: overrides"] = dict(group.overrides)
    package = package_of(c.sglang_python) if any(given.values()) else None
    known = frozenset[str]() if package is None else arguments_of(package)
    for where, arguments in given.items() if known else ():
        for name in arguments:
            plain = name.lstrip("-").replace("_", "-")
            if not any(argument.startswith(plain) for argument in known):
                near = difflib.get_close_matches(plain, known, n=3)
                remedy = f"did you mean {' or '.join(near)}?" if near else "see its launch_server --help"
                yield Fault(where, name, f"the SGLang in {package} has no such argument", remedy)


def argument_faults(where: str, arguments: Mapping[str, Any]) -> Iterator[Fault]:
    """Options of SGLang that are not free to give, or not written as such."""
    for name, value in arguments.items():
        plain = name.lstrip("-").replace("_", "-")
        if plain in GIVEN_ELSEWHERE:
            reason = f"{name} follows from another option"
            yield Fault(where, str(value), reason, f"give {GIVEN_ELSEWHERE[plain]}")
        elif name.startswith("-"):
            yield Fault(where, name, "is written without dashes", f"write {name.lstrip('-')}")


def one_rank(c: RunConfig) -> Iterator[Fault]:
    """The checksums of several ranks are of shards, which can't be compared with whole tensors."""
    if c.engine == "sglang" and c.rollout_num_gpus_per_engine > 1:
        reason = "not yet done: to prove what an SGLang of several ranks has loaded"
        ranks = str(c.rollout_num_gpus_per_engine)
        yield Fault("--rollout-num-gpus-per-engine", ranks, reason, "give 1; use --rollout-num-engines")
    for name in ("tp-size", "tp", "tensor-parallel-size", "pp-size", "dp-size", "quantization"):
        value = c.sglang_args.get(name, c.sglang_args.get(name.replace("-", "_")))
        if value not in (None, 1):
            reason = "not yet done: to prove what an engine of several ranks, or with quantised weights, has loaded"
            yield Fault("--sglang-args", f"{name}={value}", reason, "leave it out; use --rollout-num-engines")


def seeds_count(c: RunConfig) -> Iterator[Fault]:
    """SGLang heeds the seed of a request with enable-deterministic-inference only, which no CPU has."""
    if c.engine == "sglang" and c.deterministic:
        yield Fault(
            "--deterministic", "", "SGLang's tokens depend on more than the seed", "use embedded engines"
        )


SGLANG_CHECKS = (
    only_with_sglang,
    only_with_embedded,
    arguments_are_free,
    arguments_are_known,
    one_rank,
    seeds_count,
)
