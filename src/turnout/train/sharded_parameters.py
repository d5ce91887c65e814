"""The optimizer over this rank's part of the parameters: fp32 masters, gradients and moments, AdamW.

Promises: every element of the model is stepped by exactly the ranks that hold it, all with the same gradient norm,
which counts every element once; what several ranks hold stays equal on them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from turnout.core.errors import InvariantBroken
from turnout.train.offload import filling
from turnout.train.pieces import Piece, place
from turnout.train.settings import OptimizerSettings
from turnout.train.sharded_model import WITHIN_HEADS, ShardedModel

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedAdamW:
    """torch's AdamW, fused, over the local parts. Implements turnout.train.finite_steps.Optimizer and
    turnout.train.offload.Trained: `state` has by kind and parameter the local parts, or what is kept of them while
    their memory is given back."""

    def __init__(self, model: ShardedModel, settings: OptimizerSettings) -> None:
        self.settings = settings
        self._model = model
        self.parameters: dict[str, Parameter] = dict(model.module.named_parameters())
        self._masters = {name: Parameter(local_part(p)) for name, p in self.parameters.items()}
        groups = [
            {"params": [m for n, m in self._masters.items() if (self.parameters[n].dim() >= 2) == matrix],
             "weight_decay": settings.weight_decay if matrix else 0.0}
            for matrix in (True, False)
        ]  # fmt: skip
        self._torch = torch.optim.AdamW(
            groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True
        )
        self._here = {"master": {name: master.data for name, master in self._masters.items()}}
        self._here |= {
            kind: {n: torch.zeros_like(part) for n, part in self._here["master"].items()} for kind in MOMENTS
        }
        for name, master in self._masters.items():
            moments = {kind: self._here[kind][name] for kind in MOMENTS}
            self._torch.state[master] = {"step": torch.zeros((), device=master.device), **moments}
        self.state, self._steps = self._here, 0

    @property
    def steps(self) -> int:
        return self._steps

    @steps.setter
    def steps(self, count: int) -> None:
        self._steps = count
        for state in self._torch.state.values():
            state["step"].fill_(count)

    @property
    def resident(self) -> dict[str, Tensor]:
        """All that a step can't make anew: storages that FSDP and torch's AdamW go on with, paddings too."""
        return {
            f"{kind}.{name}": filling(part)
            for kind, parts in self._here.items()
            for name, part in parts.items()
            if part.untyped_storage().nbytes()
        }

    @property
    def made(self) -> list[Tensor]:
        return []  # gradients end with their step, and what FSDP gathers with its use

    @property
    def away(self) -> bool:
        return self.state is not self._here

    def between_steps(self) -> bool:
        return all(parameter.grad is None for parameter in self.parameters.values())

    def leaves(self, kept: Mapping[str, Tensor]) -> None:
        self.state = {
            kind: {name: _like(part, kept.get(f"{kind}.{name}")) for name, part in parts.items()}
            for kind, parts in self._here.items()
        }

    def comes(self) -> None:
        self.state = self._here

    def gradient_norm(self) -> float:
        """Global L2 norm over all elements of the model. Collective."""
        for name, master in self._masters.items():
            grad = self.parameters[name].grad
            master.grad = torch.zeros_like(master.data) if grad is None else local_part(grad)
        self._add_over_heads()
        own = [m.grad for n, m in self._masters.items() if self._speaks_for(n) and m.grad is not None]
        norms = torch.stack([torch.linalg.vector_norm(grad) for grad in own]).double()
        square = (norms**2).sum()
        dist.all_reduce(square)
        return float(square.sqrt())

    def _add_over_heads(self) -> None:
        """Weights that every rank applies to its own heads: their gradient is the sum over those ranks."""
        if self._model.mesh.tensor.size() == 1:
            return
        grads = [m.grad for n, m in self._masters.items() if n.endswith(WITHIN_HEADS) and m.grad is not None]
        if grads:
            flat = torch.cat(grads)
            dist.all_reduce(flat, group=self._model.mesh.tensor.get_group())
            for grad, total in zip(grads, flat.split([len(grad) for grad in grads])):
                grad.copy_(total)

    def _speaks_for(self, name: str) -> bool:
        """Whether this rank counts and saves its part: others of its tensor-parallel row may hold the same."""
        return self._differs(name) or self._model.mesh.tensor.get_local_rank() == 0

    def _differs(self, name: str) -> bool:
        """Whether the ranks of a tensor-parallel row hold different parts of it."""
        return name in self._model.divided or _split_dim(self.parameters[name]) is not None

    def step(self, lr: float, norm: float) -> None:
        limit = self.settings.clip_grad
        if limit > 0 and norm > limit:
            for master in self._masters.values():
                if master.grad is not None:
                    master.grad.mul_(limit / norm)
        for group in self._torch.param_groups:
            group["lr"] = lr
        self._torch.step()
        self._steps += 1
        self.discard()

    def discard(self) -> None:
        for name, master in self._masters.items():
            self.parameters[name].grad = master.grad = None

    def gather(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """The whole parameter in `dtype` on rank 0, None elsewhere. Collective."""
        mesh = self._model.mesh
        part = self.state["master"][name].to(dtype).contiguous()
        if dist.get_rank() > 0:
            if part.numel() and self._speaks_for(name):
                dist.send(part, 0)
            return None
        whole = torch.empty(self._model.shapes[name], dtype=dtype, device=part.device)
        for data in range(mesh.data.size()):
            for tensor in range(mesh.tensor.size() if self._differs(name) else 1):
                start, shape = self._place(name, data, tensor)
                target = whole[tuple(slice(at, at + size) for at, size in zip(start, shape))]
                if data == tensor == 0:
                    target.copy_(part)
                elif target.numel():
                    received = torch.empty(shape, dtype=dtype, device=part.device)
                    dist.recv(received, mesh.rank_of(data, tensor))
                    target.copy_(received)
        return whole

    def _place(self, name: str, data: int, tensor: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        mesh, split = self._model.mesh, _split_dim(self.parameters[name])
        sizes = (data, mesh.data.size()), (tensor, mesh.tensor.size())
        if mesh.experts is not None and name in self._model.divided:
            rank, (copies, parts) = mesh.rank_of(data, tensor), mesh.experts.shape
            split, sizes = 0, ((rank // parts, copies), (rank % parts, parts))
        return place(self._model.shapes[name], split, *sizes)

    def pieces(self, prefix: str = "") -> list[Piece]:
        """This rank's part of every parameter, with its master and moments; `prefix` comes before the names."""
        mesh, pieces = self._model.mesh, list[Piece]()
        for name in self._masters:
            whole = self._model.shapes[name]
            start, shape = self._place(name, *mesh.coordinates)
            tensors = {kind: parts[name] for kind, parts in self.state.items()}
            if shape != (held := tuple(tensors["master"].shape)):
                raise InvariantBroken(f"{name}: this rank holds {held}, planned was {shape}")
            pieces.append(Piece(prefix + name, whole, start, shape, tensors, self._speaks_for(name)))
        return pieces


def _like(part: Tensor, kept: Tensor | None) -> Tensor:
    """What is kept of the storage of `part`, in its shape; `part` itself where it is empty."""
    return part if kept is None else kept.as_strided(part.shape, part.stride(), part.storage_offset())


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part, sharing its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _split_dim(parameter: Tensor) -> int | None:
    """The dimension that tensor parallelism splits, None where every rank of a row has the same part."""
    if isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 2:
        placement = parameter.placements[1]
        return placement.dim if isinstance(placement, Shard) else None
    return None
