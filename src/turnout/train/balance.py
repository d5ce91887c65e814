"""Which data-parallel rank trains which samples. Pure: shapes in, plans out, the same on every rank.

A group's shared prompt is computed once where its samples stay together, so whole groups go to ranks, the costly
ones first, each to the rank with the least work. Where that leaves a rank with much more than its share, its
costliest group is halved, and again; what gave the lowest highest load is taken.

Promises: every sample is on exactly one rank; every rank makes the same number of micro-batches, empty ones
where it has fewer, so that their collective calls match; the same shapes give the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from turnout.train.packing import Member, MicroBatch, SampleShape, Unit, plan_micro_batches

Wide = NDArray[np.float64]
Piece = tuple[float, list[int]]  # the cost of samples that stay together, and their indices
HALVINGS = 8  # at most so many for each rank
SLACK = 1.05  # highest load over the mean one that is left alone: halving a group computes its prompt twice


class World(Protocol):
    """The processes that train one batch together. Each has the whole batch; `plan` says which part is its own."""

    def plan(self, shapes: Sequence[SampleShape], max_tokens: int) -> tuple[MicroBatch, ...]:
        """This process's micro-batches, as many as every other's. Errors as of plan_micro_batches, on all."""
        ...

    def sum(self, values: Wide) -> Wide:
        """The sums over the parts of the batch; bit-equal in every process."""
        ...

    def max(self, values: Wide) -> Wide:
        """As `sum`, the greatest."""
        ...


class OneProcess:
    """The world of a trainer that is alone: every part of the batch is its own."""

    def plan(self, shapes: Sequence[SampleShape], max_tokens: int) -> tuple[MicroBatch, ...]:
        return plan_micro_batches(shapes, max_tokens)

    def sum(self, values: Wide) -> Wide:
        return values

    def max(self, values: Wide) -> Wide:
        return values


def balance(shapes: Sequence[SampleShape], ranks: int) -> list[list[int]]:
    """Per rank the indices of its samples, in ascending order."""
    groups: dict[int, list[int]] = {}
    for index, shape in enumerate(shapes):
        groups.setdefault(shape.prompt_number, []).append(index)
    pieces = [(_cost(group, shapes), group) for group in groups.values()]
    best = tried = _place(pieces, ranks)
    for _ in range(HALVINGS * ranks):
        highest = max(tried, key=_load)
        wide = [piece for piece in highest if len(piece[1]) > 1]
        if _load(highest) <= SLACK * sum(map(_load, tried)) / ranks or not wide:
            break
        largest = max(wide, key=lambda piece: (piece[0], -piece[1][0]))
        halves = [(_cost(half, shapes), half) for half in _halves(largest[1], shapes)]
        pieces = [piece for piece in pieces if piece is not largest] + halves
        tried = _place(pieces, ranks)
        if max(map(_load, tried)) < max(map(_load, best)):
            best = tried
    return [sorted(index for _, piece in rank for index in piece) for rank in best]


def _load(rank: Sequence[Piece]) -> float:
    return sum(cost for cost, _ in rank)


def _cost(piece: Sequence[int], shapes: Sequence[SampleShape]) -> float:
    return Unit(shapes[piece[0]].prompt, tuple(Member(i, shapes[i].response) for i in piece)).cost


def _place(pieces: Sequence[Piece], ranks: int) -> list[list[Piece]]:
    """Longest processing time first (Graham 1969): the costliest piece to the rank with the least work."""
    placed: list[list[Piece]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for piece in sorted(pieces, key=lambda piece: (-piece[0], piece[1][0])):
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        placed[rank].append(piece)
        loads[rank] += piece[0]
    return placed


def _halves(piece: Sequence[int], shapes: Sequence[SampleShape]) -> list[list[int]]:
    """Two parts of about equal cost."""
    ordered = sorted(piece, key=lambda i: (-shapes[i].response, i))
    halves: list[list[int]] = [[], []]
    tokens = [0, 0]
    for index in ordered:
        side = int(tokens[1] < tokens[0])
        halves[side].append(index)
        tokens[side] += shapes[index].response
    return halves


def plan_ranks(
    shapes: Sequence[SampleShape], max_tokens: int, ranks: int
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Per rank its micro-batches over all samples, of at most `max_tokens` rows each. Raises as
    plan_micro_batches does."""
    plans: list[tuple[MicroBatch, ...]] = []
    plan_micro_batches(shapes, max_tokens)  # names every sample above the budget by its number in the batch
    for chosen in balance(shapes, ranks):
        planned = plan_micro_batches([shapes[index] for index in chosen], max_tokens)
        plans.append(tuple(micro.of(chosen) for micro in planned))
    most = max(len(plan) for plan in plans)
    return tuple(plan + (MicroBatch(()),) * (most - len(plan)) for plan in plans)
