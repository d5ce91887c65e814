"""Which data-parallel rank trains which samples. Pure: shapes in, plans out, the same on every rank.

A group's shared prompt is computed once where its samples stay together, so whole groups go to ranks, the costly
ones first, each to the rank with the least work. Where that leaves a rank with much more than its share, its
costliest group is halved, as long as this lowers the highest load.

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
    pieces = list(groups.values())
    best = _place(pieces, shapes, ranks)
    while True:
        loads = [sum(_cost(piece, shapes) for piece in rank) for rank in best]
        highest = max(loads)
        wide = [piece for piece in best[loads.index(highest)] if len(piece) > 1]
        if highest <= SLACK * sum(loads) / ranks or not wide:
            break
        largest = max(wide, key=lambda piece: (_cost(piece, shapes), -piece[0]))
        pieces = [p for rank in best for p in rank if p is not largest] + _halves(largest, shapes)
        tried = _place(pieces, shapes, ranks)
        if max(sum(_cost(piece, shapes) for piece in rank) for rank in tried) >= highest:
            break
        best = tried
    return [sorted(index for piece in rank for index in piece) for rank in best]


def _cost(piece: Sequence[int], shapes: Sequence[SampleShape]) -> float:
    return Unit(shapes[piece[0]].prompt, tuple(Member(i, shapes[i].response) for i in piece)).cost


def _place(pieces: list[list[int]], shapes: Sequence[SampleShape], ranks: int) -> list[list[list[int]]]:
    """Longest processing time first (Graham 1969): the costliest piece to the rank with the least work."""
    placed: list[list[list[int]]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    costs = [_cost(piece, shapes) for piece in pieces]
    for number in sorted(range(len(pieces)), key=lambda n: (-costs[n], pieces[n][0])):
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        placed[rank].append(pieces[number])
        loads[rank] += costs[number]
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
