"""One model over ranks: FSDP2 over the data-parallel dimension of a device mesh, tensor parallel over the other.

Tensor parallel: heads and the inner width of the MLPs (Shoeybi et al. 2019, arXiv 1909.08053) by DTensor, embedding
and head by words (turnout.train.head); norms are computed on every rank. Expert parallel: experts are divided over
neighbouring ranks, of any kind (turnout.train.experts), and FSDP is over those that hold the same ones; without it
they are whole on every tensor-parallel rank.

Promises: parameters keep their HF names; masters, and gradients over ranks, are fp32 whatever the compute dtype;
gradients are sums over ranks, not means; a size that the model cannot be split by is refused before anything is
loaded, with those that divide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import Parameter
from torch.nn import functional as F
from transformers import PretrainedConfig

from turnout.core.errors import ConfigError, Fault
from turnout.train.balance import Wide, plan_ranks
from turnout.train.experts import divide_experts, expert_modules
from turnout.train.fused import fuse
from turnout.train.head import VocabularyPart, chunked_logprobs
from turnout.train.model import CausalModel, DeviceRows
from turnout.train.packing import MicroBatch, SampleShape
from turnout.train.pieces import place
from turnout.train.settings import TrainerSettings
from turnout.train.sharded_load import Source

WITHIN_HEADS = ("q_norm.weight", "k_norm.weight")  # each rank has the gradient of its own heads only


@dataclass(frozen=True)
class Mesh:
    """This process's place among the ranks; implements World. Ranks that differ only in "tp" have the same
    samples. `experts` has the same ranks: those that differ only in "ep" have all experts together, those that
    differ only in "edp" have the same ones; None without expert parallel."""

    device: DeviceMesh
    experts: DeviceMesh | None = None

    @staticmethod
    def of(tensor_parallel: int, expert_parallel: int = 1) -> Mesh:
        """Collective. The process group must be there; neighbouring ranks are tensor parallel, and expert
        parallel."""
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        sizes = (dist.get_world_size() // tensor_parallel, tensor_parallel)
        device = init_device_mesh(kind, sizes, mesh_dim_names=("dp", "tp"))
        if expert_parallel == 1:
            return Mesh(device)
        sizes = (dist.get_world_size() // expert_parallel, expert_parallel)
        return Mesh(device, init_device_mesh(kind, sizes, mesh_dim_names=("edp", "ep")))

    @property
    def data(self) -> DeviceMesh:
        return self.device["dp"]

    @property
    def tensor(self) -> DeviceMesh:
        return self.device["tp"]

    @property
    def coordinates(self) -> tuple[int, int]:
        """(data-parallel, tensor-parallel) rank of this process."""
        return self.data.get_local_rank(), self.tensor.get_local_rank()

    def rank_of(self, data: int, tensor: int) -> int:
        return data * self.tensor.size() + tensor

    def plan(self, shapes: Sequence[SampleShape], max_tokens: int) -> tuple[MicroBatch, ...]:
        plans = plan_ranks(shapes, max_tokens, self.data.size())
        return plans[self.data.get_local_rank()]

    def sum(self, values: Wide) -> Wide:
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Wide) -> Wide:
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Wide, how: dist.ReduceOp.RedOpType) -> Wide:
        """Over all ranks, the first of each tensor-parallel row speaking for it: all take the same decisions."""
        mine = torch.from_numpy(values).to(self.device.device_type, copy=True)
        if how == dist.ReduceOp.SUM and self.tensor.get_local_rank() > 0:
            mine.zero_()
        dist.all_reduce(mine, how)
        return mine.cpu().numpy()


def check_split(config: PretrainedConfig, settings: TrainerSettings, whose: str = "model") -> None:
    """Raises ConfigError with everything of the model that is not a multiple of the tensor-parallel size, or whose
    experts cannot be divided."""
    tensor_parallel = settings.tensor_parallel
    counts = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "inner width of the MLP": config.intermediate_size,
        "vocabulary": config.vocab_size,
    }
    experts = getattr(config, "num_experts", 0)
    if experts and not config.mlp_only_layers and config.decoder_sparse_step == 1:
        del counts["inner width of the MLP"]
    allowed = [n for n in range(1, 65) if all(count % n == 0 for count in counts.values())]
    faults = [
        Fault(
            "--tensor-model-parallel-size",
            str(tensor_parallel),
            f"the {whose}'s {what}, {count}, cannot be split by it",
            f"one of {', '.join(map(str, allowed))}",
        )
        for what, count in counts.items()
        if count % tensor_parallel
    ]
    faults += _expert_faults(experts, settings)
    if faults:
        raise ConfigError(faults)


def _expert_faults(experts: int, settings: TrainerSettings) -> list[Fault]:
    size, ranks = settings.expert_parallel, settings.ranks
    fit = [n for n in range(1, ranks + 1) if ranks % n == 0 and experts % n == 0]
    if size == 1 or (experts and size in fit):
        return []
    reason = f"the model's {experts} experts on {ranks} trainer devices cannot be split by it"
    remedy = f"one of {', '.join(map(str, fit))}"
    if not experts:
        reason, remedy = "the model has no experts", "leave it out"
    return [Fault("--expert-model-parallel-size", str(size), reason, remedy)]


class _Root(torch.nn.Module):
    """What FSDP gathers as one: embedding, final norm and head, around the layers."""

    def __init__(self, module: torch.nn.Module, run: Callable[[DeviceRows], Any]) -> None:
        super().__init__()
        self.module: Any = module
        self._run = run

    def forward(self, rows: DeviceRows) -> Any:
        return self._run(rows)


class ShardedModel(CausalModel):
    """A CausalModel whose parameters lie in parts on the ranks of a mesh."""

    def __init__(self, model: CausalModel, source: Source, mesh: Mesh, dtype: torch.dtype) -> None:
        """Takes the model without data, and gives it this rank's part of the source's; `dtype` is the one it
        computes in."""
        tied = model.tied_head is not None
        options = model.options
        self.mesh = mesh
        self.shapes = {name: tuple(p.shape) for name, p in model.module.named_parameters()}
        if mesh.tensor.size() > 1:
            words = model.head.shape[0] // mesh.tensor.size()
            part = VocabularyPart(words * mesh.tensor.get_local_rank(), mesh.tensor.get_group())
            options = replace(options, part=part)
            _split_layers(model.module, mesh.tensor)
            _split_words(model.module, mesh.tensor, tied)
        self.divided = set[str]()  # parameters of experts of which this rank holds some
        if mesh.experts is not None:
            same = mesh.tensor.get_group() if mesh.tensor.size() > 1 else None
            self.divided = divide_experts(model.module, mesh.experts["ep"].get_group(), same)
        fill = _Filling(model.module, self, source)
        root = _Root(model.module, self.run)
        for module, ranks in _units(root, mesh):
            fill(module)
            _shard(module, ranks, dtype)
        fuse(model.module, dtype)
        super().__init__(model.module, options)
        self._root = root

    def logprobs(self, rows: DeviceRows) -> tuple[Tensor, Tensor]:
        return self._root(rows)

    def run(self, rows: DeviceRows) -> Any:
        """What is asked of the model, here as `logprobs`, once the root's parameters are gathered."""
        return chunked_logprobs(self.hidden(rows), _local(self.head), rows.targets, self.options)

    def embed(self, ids: Tensor) -> Tensor:
        embedded = _Embedding.apply(_local(self.embedding), ids - self.options.first)
        if self.options.part is None:
            return embedded  # pyright: ignore[reportReturnType]
        parts = DTensor.from_local(embedded, self.mesh.tensor, [Partial()], run_check=False)
        return parts.redistribute(placements=[Replicate()]).to_local()


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _Embedding(torch.autograd.Function):
    """Rows of the embedding, zero for words of other ranks; the gradient of a word is added up in fp32."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        inside = (ids >= 0) & (ids < weight.shape[0])
        ids = torch.where(inside, ids, 0)
        ctx.save_for_backward(ids, inside)
        ctx.like = weight.shape, weight.dtype
        return F.embedding(ids, weight).masked_fill_(~inside[:, None], 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ids, inside = ctx.saved_tensors
        shape, dtype = ctx.like
        total = torch.zeros(shape, device=ids.device)
        total.index_add_(0, ids, grads[0].float().masked_fill_(~inside[:, None], 0.0))
        return total.to(dtype), None


def _split_layers(module: Any, mesh: DeviceMesh) -> None:
    """Heads of the attention and columns of the MLP; a layer's input is on all ranks, so is its output."""
    styles: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Replicate()},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(),
    }
    mlp: dict[str, ParallelStyle] = {
        # one DTensor for both products: their gradients are added before they cross ranks
        "mlp": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for layer in module.get_decoder().layers:
        parallelize_module(layer, mesh, styles | (mlp if hasattr(layer.mlp, "gate_proj") else {}))


def _split_words(module: Any, mesh: DeviceMesh, tied: bool) -> None:
    ends = [module.get_input_embeddings(), module.get_output_embeddings()]
    for end in ends[:1] if tied else ends:
        split = distribute_tensor(end.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        end.weight = Parameter(split, requires_grad=end.weight.requires_grad)
    if tied and hasattr(ends[1], "weight"):  # a model of values has no output head
        ends[1].weight = ends[0].weight


class _Filling:
    """Gives parameters without data those of the source: of each, the part of this rank before FSDP divides it."""

    def __init__(self, module: torch.nn.Module, model: ShardedModel, source: Source) -> None:
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._model, self._source = model, source

    def __call__(self, unit: torch.nn.Module) -> None:
        made: dict[str, Parameter] = {}  # kept no longer: FSDP frees what nobody holds
        for owner in unit.modules():
            for leaf, parameter in list(owner.named_parameters(recurse=False)):
                if parameter.device.type == "meta":
                    name = self._names[id(parameter)]
                    if name not in made:  # a tied head is made once, in the unit of its embedding
                        made[name] = self._filled(name, parameter)
                    setattr(owner, leaf, made[name])

    def _filled(self, name: str, parameter: Parameter) -> Parameter:
        mesh, whole = self._model.mesh, self._model.shapes[name]
        split, part = None, (0, 1)
        if name in self._model.divided and mesh.experts is not None:
            experts = mesh.experts["ep"]
            split, part = 0, (experts.get_local_rank(), experts.size())
        elif isinstance(parameter, DTensor) and isinstance(parameter.placements[0], Shard):
            split, part = parameter.placements[0].dim, (mesh.tensor.get_local_rank(), mesh.tensor.size())
        data = self._source.read(name, place(whole, split, (0, 1), part))
        if isinstance(parameter, DTensor):
            data = DTensor.from_local(data, parameter.device_mesh, parameter.placements, run_check=False)
        return Parameter(data, requires_grad=parameter.requires_grad)


def _units(root: _Root, mesh: Mesh) -> list[tuple[torch.nn.Module, DeviceMesh]]:
    """What FSDP gathers at once, inner ones first, with the ranks that it is divided over. The root as well: else a
    forward without backward leaves it gathered, and the next one sees old weights."""
    experts = mesh.experts
    inner = [] if experts is None else [(part, experts["edp"]) for _, part in expert_modules(root)]
    return inner + [(module, mesh.data) for module in (*root.module.get_decoder().layers, root)]


def _shard(module: torch.nn.Module, ranks: DeviceMesh, dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    sharded: Any = fully_shard(module, mesh=ranks, mp_policy=policy, reshard_after_forward=True)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)
