"""Experts divided over ranks: each holds some of every layer's, and tokens travel to them and back (all-to-all).

A rank sends every token to the ranks of the experts that its router chose, each of which computes the tokens of all
ranks at once; backward goes the same way (GShard, arXiv 2006.16668). Tensor-parallel ranks have the same tokens,
and each sends its share of them. No token is dropped, no expert has a capacity.

Promises: what a token gets does not depend on how many ranks there are but for rounding; a rank that no token comes
to gives its experts a gradient all the same, zero: ranks that share them expect one of each.

Legend: T tokens, k experts of a token, R rows that came to this rank, H hidden, e experts of this rank, n ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

Splits = tuple[list[int], list[int]]  # rows for each rank, rows from each


def expert_modules(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The experts of each layer that has some, by name: stacks gate_up_proj [E, 2 I, H] and down_proj [E, H, I]."""
    for name, part in module.named_modules():
        if name.endswith(".experts"):
            yield name, part


def divide_experts(
    module: torch.nn.Module, group: dist.ProcessGroup, same: dist.ProcessGroup | None
) -> set[str]:
    """Leaves this rank's share of every layer's experts, in the order of ranks; `group` are the ranks that hold all
    together, and a size that divides their number; `same` those that have the same tokens, None: this one alone.
    Returns the names of the parameters that are divided."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    divided: set[str] = set()
    for name, experts in expert_modules(module):
        experts.num_experts //= size
        for leaf, parameter in list(experts.named_parameters()):
            mine = parameter.detach().chunk(size)[rank].clone()
            setattr(experts, leaf, Parameter(mine, requires_grad=parameter.requires_grad))
            divided.add(f"{name}.{leaf}")
        experts.forward = _Divided(experts, group, same)
    return divided


class _Divided:
    """The forward of one layer's experts, over all ranks; the model code's computes those of this rank."""

    def __init__(self, experts: Any, group: dist.ProcessGroup, same: dist.ProcessGroup | None) -> None:
        self._experts, self._compute = experts, experts.forward
        self._group, self._same = group, same

    def __call__(self, hidden_TH: Tensor, index_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """[T, H]"""
        if self._same is None:
            return self._routed(hidden_TH, index_Tk, weights_Tk)
        hidden, weights = (_Share.apply(x, self._same) for x in (hidden_TH, weights_Tk))
        mine = self._routed(hidden, index_Tk[_share(len(index_Tk), self._same)], weights)  # pyright: ignore[reportArgumentType]
        return _Whole.apply(mine, len(hidden_TH), self._same)  # pyright: ignore[reportReturnType]

    def _routed(self, hidden_TH: Tensor, index_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        chosen, size = index_Tk.reshape(-1), dist.get_world_size(self._group)
        order = torch.argsort(chosen, stable=True)
        sent = torch.bincount(chosen, minlength=size * self._experts.num_experts).view(size, -1)  # [n, e]
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent, group=self._group)
        out, into = sent.sum(1).tolist(), came.sum(1).tolist()
        rows_RH = _exchange(hidden_TH.index_select(0, order // index_Tk.shape[1]), (out, into), self._group)
        back = _exchange(self._computed(rows_RH, came), (into, out), self._group)
        back = back.index_select(0, torch.argsort(order)).view(*index_Tk.shape, hidden_TH.shape[1])
        return (back * weights_Tk[..., None]).sum(1).to(hidden_TH.dtype)

    def _computed(self, rows_RH: Tensor, came: Tensor) -> Tensor:
        """[R, H]; `came` [n, e] counts the rows, which are in its order."""
        own = torch.arange(self._experts.num_experts, device=came.device).repeat(len(came))
        own_R1, count = torch.repeat_interleave(own, came.reshape(-1))[:, None], len(rows_RH)
        if not count:
            rows_RH = torch.cat((rows_RH, rows_RH.new_zeros(1, rows_RH.shape[1])))
            own_R1 = own_R1.new_zeros(1, 1)
        return self._compute(rows_RH, own_R1, rows_RH.new_ones(own_R1.shape))[:count]


class _Exchange(torch.autograd.Function):
    """Rows to every rank of the group in turn, and as many as each of them has for this one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, splits: Splits, group: dist.ProcessGroup) -> Tensor:
        ctx.splits, ctx.group = splits, group
        sent, came = splits
        out = rows.new_empty(sum(came), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), came, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sent, came = ctx.splits
        return _exchange(grads[0], (came, sent), ctx.group), None, None


def _exchange(rows: Tensor, splits: Splits, group: dist.ProcessGroup) -> Tensor:
    return _Exchange.apply(rows, splits, group)  # pyright: ignore[reportReturnType]


class _Share(torch.autograd.Function):
    """This rank's share of rows that all ranks of the group have; their gradient is on all again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.count, ctx.group = len(rows), group
        return rows[_share(len(rows), group)].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _whole(grads[0], ctx.count, ctx.group), None


class _Whole(torch.autograd.Function):
    """The way back from _Share: all shares, on every rank."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.count, ctx.group = count, group
        return _whole(share, count, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0][_share(ctx.count, ctx.group)], None, None


def _share(count: int, group: dist.ProcessGroup) -> slice:
    """Rows of this rank: as many for each, the last ones may have fewer, or none."""
    each = -(-count // dist.get_world_size(group))
    return slice(each * dist.get_rank(group), each * (dist.get_rank(group) + 1))


def _whole(share: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    each = -(-count // size)
    padded = share.new_zeros(each, *share.shape[1:])
    padded[: len(share)] = share
    out = share.new_empty(each * size, *share.shape[1:])
    dist.all_gather_single(out, padded, group=group)
    return out[:count].clone() if count < len(out) else out
