"""Options of placement: how many devices trainer and engines have, and which engines there are."""

from __future__ import annotations

from typing import ClassVar, Literal

from turnout.config.option import PATH, Options, option


class TopologyOptions(Options):
    title: ClassVar[str] = "Topology"

    sglang_config: str | None = option(
        None,
        "YAML file with groups of engines: sizes, options, prefill and decode, other models "
        "(docs/guides/server-groups.md). The name and the form are slime's; the engines are those of --engine.",
        unset="--rollout-num-engines engines that are alike",
        pattern=PATH,
    )
    rollout_num_gpus: int | None = option(
        None,
        "Devices of all engines. An engine has one for each of its ranks; without GPUs a device is a process.",
        unset="what the engines need; with --colocate those of the trainer",
        unit="devices",
        ge=0,
    )
    actor_num_nodes: int = option(1, "Machines of the trainer; several with --cluster ray.", ge=1)
    actor_num_gpus_per_node: int = option(
        1, "Devices of the trainer on each of its machines.", unit="devices", ge=1
    )
    tensor_model_parallel_size: int = option(
        1,
        "Devices of the trainer that share each product of matrices; the others are data parallel, with the "
        "parameters sharded over all.",
        unit="devices",
        ge=1,
    )
    expert_model_parallel_size: int = option(
        1,
        "Devices of the trainer that hold the experts of a mixture of experts together; tokens travel to those of "
        "their experts and back.",
        unit="devices",
        ge=1,
    )
    num_gpus_per_node: int | None = option(
        None,
        "Devices of one machine. An engine lies on one machine, or on several whole ones.",
        unset="as many as the run needs",
        unit="devices",
        ge=1,
    )
    colocate: bool = option(
        False,
        "Trainer and engines share devices, instead of having each their own. Both keep their memory unless "
        "--offload says otherwise; leave room by the size of the engines' caches.",
    )
    offload: bool = option(False, "--offload-train and --offload-rollout.")
    offload_train: bool = option(
        False,
        "Between its steps the trainer gives the memory of weights, gradients and optimizer back, which lie in a "
        "file in the run directory then (docs/guides/colocated.md).",
    )
    offload_rollout: bool = option(
        False, "While the trainer trains, the engines give the memory of their weights and KV back."
    )
    cluster: Literal["local", "ray"] = option(
        "local",
        "Where the engines and the ranks of a trainer of several devices lie: processes of this machine, or a "
        "placement group of a Ray cluster with an actor beside each (docs/guides/ray.md).",
    )
    ray_address: str | None = option(
        None,
        "Address of the Ray cluster.",
        unset="the variable RAY_ADDRESS, else a cluster of this machine, which the run starts and ends",
        pattern=r"^(auto|[^/\s]+:[0-9]+)$",
    )
    rollout_data_transport: Literal["local", "object-store", "nixl"] | None = option(
        None,
        "Way of rollout data to a trainer of several devices: shared memory of this machine, or the object store "
        "of the Ray cluster. A trainer of one device has them in its process.",
        unset="the one that reaches the trainer's ranks",
    )
