"""Options of the rollout engines and of watching them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from turnout.config.option import PATH, Options, option


class EngineOptions(Options):
    title: ClassVar[str] = "Engines"

    engine: Literal["embedded", "sglang"] = option("embedded", "Program that serves the rollouts.")
    rollout_num_engines: int | None = option(
        None,
        "Engines, each a process of its own.",
        unset="1, or as many as --rollout-num-gpus, --colocate or --sglang-config say",
        ge=1,
    )
    rollout_num_gpus_per_engine: int = option(
        1,
        "Tensor parallel ranks of each engine, each a process with a part of the weights.",
        ge=1,
    )
    engine_threads: int | None = option(
        None,
        "Compute threads of each engine, of each rank where it has several.",
        unset="the CPUs divided by the ranks of all engines, at least 1",
        ge=1,
    )
    engine_max_total_tokens: int = option(
        32768, "Size of each engine's KV cache, shared by all its requests.", unit="tokens", ge=16
    )
    engine_max_running_requests: int = option(
        64,
        "Requests that one engine decodes at a time; as many more wait in its queue, the rest at the controller.",
        unit="requests",
        ge=1,
    )
    engine_step_tokens: int = option(
        512,
        "Most tokens in one forward pass of an engine; longer prompts are computed in pieces.",
        unit="tokens",
        ge=1,
    )
    engine_row_block: int = option(
        64,
        "Rows that every matrix product of an engine runs with; a fixed number makes a result independent of "
        "what else is in the batch.",
        unit="rows",
        ge=8,
    )
    engine_expert_parallel_size: int = option(
        1,
        "Groups of an engine's ranks that hold the experts of a mixture of experts together, each whole ones. It "
        "divides --rollout-num-gpus-per-engine.",
        unit="groups",
        ge=1,
    )
    engine_quantization: Literal["none", "int8", "fp8"] = option(
        "none",
        "How an engine keeps the weights of its linear layers: as they are, int8 per output row, or fp8 in "
        "blocks of 128 x 128. It quantises what the trainer publishes, and needs full updates.",
    )
    engine_start_timeout_s: float = option(
        120.0, "Deadline for an engine to start and load its model.", unit="seconds", gt=0
    )
    rollout_health_check_interval: float = option(1.0, "Time between health probes.", unit="seconds", gt=0)
    rollout_health_check_timeout: float = option(5.0, "Deadline of one health probe.", unit="seconds", gt=0)
    rollout_health_check_first_wait: float = option(
        0.0,
        "Time from the start of an engine's life to its first probe, for one that compiles first.",
        unit="seconds",
        ge=0,
    )
    use_fault_tolerance: bool = option(
        False,
        "Start an engine again that ended or answers no probe. It serves again when it has attested the current "
        "version; its requests go on elsewhere from the tokens they have.",
    )
    engine_restarts: int | None = option(
        None,
        "Restarts of one engine in any 10 minutes; one that ends once more is given up.",
        unset="5 with --use-fault-tolerance, else 0",
        unit="restarts",
        ge=1,
    )
    engine_linger: float = option(
        0.0,
        "How long embedded engines outlive a controller that was killed. A run that goes on by then takes them "
        "over as they are: they load its weights and attest them before they serve.",
        unit="seconds",
        ge=0,
    )
    sglang_python: str | None = option(
        None,
        "Python of an environment that has SGLang; --engine sglang runs `sglang.launch_server` with it.",
        unset="the Python that runs turnout",
        pattern=PATH,
    )
    sglang_device: Literal["cuda", "cpu"] = option(
        "cuda", "What SGLang computes on. `cpu` takes its paths in plain PyTorch: slow, for tests."
    )
    sglang_args: dict[str, Any] = option(
        {},
        "Further options of `sglang.launch_server`, by name without dashes; true is a switch: "
        '`{"mem-fraction-static": 0.8, "tp-size": 2}`.',
    )
    admin_token_env: str | None = option(
        None,
        "Name of the environment variable that holds the token for control calls. The token itself is never an "
        "option, so it reaches no file.",
        unset="no token; engines bind loopback",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
    )
