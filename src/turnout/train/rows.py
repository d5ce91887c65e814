"""One micro-batch as arrays: what goes into the model, which rows go through the head, and where results belong.

T rows of the micro-batch, M response tokens that go through the head. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnout.core.errors import TrainError
from turnout.core.routed import BYTES
from turnout.core.types import TrainSample
from turnout.train.balance import World
from turnout.train.packing import Block, MicroBatch, SampleShape, Span, attention_blocks

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Rows:
    """ids and positions are [T], the other arrays [M]. `head_rows` are the rows whose hidden state predicts
    `targets`; `sample` and `token` say which response token of which sample that is. `routed`
    [T, layers x k]: the experts of each row as turnout.core.routed has them, None where no sample has a record."""

    ids: Ints
    positions: Ints
    head_rows: Ints
    targets: Ints
    sample: Ints
    token: Ints
    blocks: tuple[Block, ...]
    routed: NDArray[np.int16] | None = None


def shapes_of(samples: Sequence[TrainSample]) -> list[SampleShape]:
    """Shapes for the planner; samples with equal prompt tokens share a prompt number."""
    numbers: dict[tuple[int, ...], int] = {}
    return [
        SampleShape(len(s.prompt_ids), len(s.response_ids), numbers.setdefault(s.prompt_ids, len(numbers)))
        for s in samples
    ]


def plan_of(
    samples: Sequence[TrainSample], chosen: Sequence[int], max_tokens: int, world: World
) -> tuple[MicroBatch, ...]:
    """This process's micro-batches over the samples of these numbers; raises as plan_micro_batches."""
    planned = world.plan(shapes_of([samples[index] for index in chosen]), max_tokens)
    return tuple(micro.of(chosen) for micro in planned)


def rows_of(micro: MicroBatch, samples: Sequence[TrainSample], masked_too: bool) -> Rows:
    """The arrays of a micro-batch. Masked response tokens go through the head only where `masked_too`. A
    micro-batch without units is one row that nothing is asked of: the model runs, as it does on other ranks."""
    if not micro.units:
        none, one = np.zeros(0, np.int64), np.zeros(1, np.int64)
        return Rows(one, one, none, none, none, none, (Block(Span(0, 1), (), (1,)),))
    ids: list[int] = []
    positions: list[Ints] = []
    parts: list[tuple[Ints, Ints, int, Ints]] = []
    for unit in micro.units:
        prompt_end = len(ids) + unit.prompt - 1
        ids += samples[unit.members[0].sample].prompt_ids
        positions.append(np.arange(unit.prompt))
        for member in unit.members:
            sample = samples[member.sample]
            first = len(ids)
            ids += sample.response_ids[:-1]
            positions.append(np.arange(unit.prompt, unit.prompt + member.tail))
            predictors = np.concatenate(([prompt_end], np.arange(first, first + member.tail)))
            chosen = np.arange(member.response) if masked_too else np.flatnonzero(sample.loss_mask)
            targets = np.asarray(sample.response_ids, np.int64)[chosen]
            parts.append((predictors[chosen], targets, member.sample, chosen))
    return Rows(
        ids=np.asarray(ids, np.int64),
        positions=np.concatenate(positions).astype(np.int64),
        head_rows=np.concatenate([p[0] for p in parts]).astype(np.int64),
        targets=np.concatenate([p[1] for p in parts]),
        sample=np.concatenate([np.full(len(p[3]), p[2], np.int64) for p in parts]),
        token=np.concatenate([p[3] for p in parts]).astype(np.int64),
        blocks=attention_blocks(micro),
        routed=_routed_of(micro, samples),
    )


def _routed_of(micro: MicroBatch, samples: Sequence[TrainSample]) -> NDArray[np.int16] | None:
    """A shared prompt went through the experts of its first member that has a record. Raises TrainError where rows
    are not one for each position."""
    members = [(unit, [(m, samples[m.sample]) for m in unit.members]) for unit in micro.units]
    widths = {_width(s) for _, inner in members for _, s in inner if s.routed}
    if not widths:
        return None
    if len(widths) > 1:
        raise TrainError(
            f"routed experts of different models in one batch: {sorted(widths)} values a position"
        )
    (width,) = widths
    parts: list[NDArray[np.int16]] = []
    for unit, inner in members:
        told = [np.frombuffer(s.routed, "<i2").reshape(-1, width) for _, s in inner]
        first = next((rows for rows in told if len(rows)), None)
        parts.append(np.full((unit.prompt, width), -1, np.int16) if first is None else first[: unit.prompt])
        for (member, _), rows in zip(inner, told):
            own = rows[unit.prompt :] if len(rows) else np.full((member.tail, width), -1, np.int16)
            parts.append(own)
    return np.concatenate(parts)


def _width(sample: TrainSample) -> int:
    positions = len(sample.prompt_ids) + len(sample.response_ids) - 1
    width, rest = divmod(len(sample.routed), BYTES * positions)
    if rest:
        raise TrainError(f"{len(sample.routed)} bytes of routed experts for {positions} positions")
    return width


def gather_tokens(rows: Rows, values: Sequence[Sequence[float] | Floats]) -> Floats:
    """[M] values of the head's tokens, from one sequence per sample, each as long as its response."""
    flat = np.concatenate([np.asarray(v, np.float32) for v in values])
    starts = np.concatenate(([0], np.cumsum([len(v) for v in values])[:-1])).astype(np.int64)
    return flat[starts[rows.sample] + rows.token]


def scatter_tokens(rows: Rows, values: Floats, into: Sequence[Floats]) -> None:
    """Puts [M] values of the head's tokens to their places: `into` has one array per sample, of its response."""
    for index in np.unique(rows.sample):
        mine = rows.sample == index
        into[index][rows.token[mine]] = values[mine]


def of_all(mine: Sequence[Floats], world: World) -> list[Floats]:
    """Values of all samples, where each process has filled in those of its own and left zeros elsewhere."""
    wide = [np.zeros(0), *(values.astype(np.float64) for values in mine)]
    flat = world.sum(np.concatenate(wide)).astype(np.float32)
    ends = np.cumsum([len(values) for values in mine])
    return [flat[end - len(values) : end] for end, values in zip(ends, mine)]
