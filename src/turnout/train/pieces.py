"""Rectangular parts of parameters: what a rank holds, what a file holds, and where the two overlap."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from torch import Tensor

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Piece:
    """A part of the parameter `name` of shape `whole`: it begins at `start` and has `shape`. `tensors` are this
    rank's by kind (master, exp_avg, exp_avg_sq), fp32 of `shape`; empty for a piece of a file. `kept` is False
    where another rank saves the same piece."""

    name: str
    whole: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    kept: bool = True

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def copied(self) -> Piece:
        """The same with tensors of its own, on the host."""
        return replace(self, tensors={k: t.detach().to("cpu", copy=True) for k, t in self.tensors.items()})

    def fits(self) -> bool:
        """Whether it lies within its parameter."""
        return len(self.whole) == len(self.start) == len(self.shape) and all(
            min(s, n) >= 0 and s + n <= w for s, n, w in zip(self.start, self.shape, self.whole)
        )

    def overlap(self, other: Piece) -> tuple[Index, Index] | None:
        """The common part as an index into this piece and one into the other; None where there is none."""
        mine: list[slice] = []
        others: list[slice] = []
        for a, n, b, m in zip(self.start, self.shape, other.start, other.shape):
            low, high = max(a, b), min(a + n, b + m)
            if low >= high:
                return None
            mine.append(slice(low - a, high - a))
            others.append(slice(low - b, high - b))
        return tuple(mine), tuple(others)


def place(
    whole: tuple[int, ...], split: int | None, data: tuple[int, int], tensor: tuple[int, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(start, shape) of the part of one rank, given as (rank, ranks) in each dimension of the mesh: evenly over
    tensor-parallel ranks along `split` (expert-parallel ones along the first), then the first dimension in chunks
    over data-parallel ones, as FSDP does it (the last chunks may be shorter, or empty)."""
    start, shape = [0] * len(whole), list(whole)
    if split is not None:
        shape[split] //= tensor[1]
        start[split] = shape[split] * tensor[0]
    rows = shape[0]
    chunk = -(-rows // data[1])
    before = min(chunk * data[0], rows)
    start[0] += before
    shape[0] = min(chunk, rows - before)
    return tuple(start), tuple(shape)
