"""Which samples go together through the model, and who sees whom. Pure planning: lengths in, plans out.

Samples that share their prompt become one unit: the prompt's rows once, then each member's tail. The last
token of a response predicts nothing that trains, so a member's tail is its response without that token.
Units are gathered into micro-batches of at most `max_tokens` rows, of about equal cost.

Attention is given as blocks: a block's queries see all rows of its prefix and, causally, the rows of their
own segment. Long sequences and long tails are cut into blocks of queries, so that scores stay small.

Promises: every sample is in exactly one unit of one micro-batch; each row is in the `own` part of exactly
one block; the same lengths give the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnout.core.errors import ConfigError, Fault, TrainError

QUERY_BLOCK = 512
TAIL_BLOCK = 256
ATTENTION_PER_PAIR = 1 / 3000  # cost of one (query, key) pair in tokens of linear layers, for small models


@dataclass(frozen=True)
class SampleShape:
    """Tokens of one sample, and the number of its prompt: equal numbers mean equal prompt tokens."""

    prompt: int
    response: int
    prompt_number: int


@dataclass(frozen=True)
class Member:
    """One sample of a unit: its index in the list that was planned, and its response tokens."""

    sample: int
    response: int

    @property
    def tail(self) -> int:
        return self.response - 1


@dataclass(frozen=True)
class Unit:
    """A prompt's rows, then the tails of its members, in order."""

    prompt: int
    members: tuple[Member, ...]

    @property
    def rows(self) -> int:
        return self.prompt + sum(m.tail for m in self.members)

    @property
    def cost(self) -> float:
        """Work of forward and backward, in tokens through the linear layers."""
        pairs = self.prompt**2 / 2 + sum(m.tail * (self.prompt + m.tail / 2) for m in self.members)
        return self.rows + pairs * ATTENTION_PER_PAIR


@dataclass(frozen=True)
class MicroBatch:
    """Units that share one row of the model's input, in order."""

    units: tuple[Unit, ...]

    @property
    def rows(self) -> int:
        return sum(unit.rows for unit in self.units)

    def of(self, chosen: Sequence[int]) -> MicroBatch:
        """The same, planned over a selection: member numbers become those of the list chosen from."""
        return MicroBatch(
            tuple(
                Unit(unit.prompt, tuple(Member(chosen[m.sample], m.response) for m in unit.members))
                for unit in self.units
            )
        )


@dataclass(frozen=True)
class Span:
    """Rows first .. first + length - 1."""

    first: int
    length: int


@dataclass(frozen=True)
class Block:
    """Queries `own` see all of `prefix` and, causally within each of `segments`, their own rows.
    The segments' lengths sum to own.length."""

    own: Span
    prefix: tuple[Span, ...]
    segments: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, tuple[int, ...]]:
        """Blocks of equal shape can be computed together."""
        return sum(span.length for span in self.prefix), self.segments


def plan_micro_batches(shapes: Sequence[SampleShape], max_tokens: int) -> tuple[MicroBatch, ...]:
    """Micro-batches over all samples, of at most `max_tokens` rows each.

    Raises ConfigError, naming each sample that alone is longer than the budget, and TrainError for a sample
    without a prompt or a response token.
    """
    _check(shapes, max_tokens)
    units = _units(shapes, max_tokens)
    total = sum(unit.rows for unit in units)
    bins: list[list[int]] = [[] for _ in range(-(-total // max_tokens))]
    rows, costs = [0] * len(bins), [0.0] * len(bins)
    for index in sorted(range(len(units)), key=lambda i: (-units[i].cost, i)):
        unit = units[index]
        room = [b for b in range(len(bins)) if rows[b] + unit.rows <= max_tokens]
        if not room:
            bins.append([])
            rows.append(0)
            costs.append(0.0)
            room = [len(bins) - 1]
        place = min(room, key=lambda b: (costs[b], b))
        bins[place].append(index)
        rows[place] += unit.rows
        costs[place] += unit.cost
    filled = sorted(sorted(chosen) for chosen in bins if chosen)
    return tuple(MicroBatch(tuple(units[i] for i in chosen)) for chosen in filled)


def _check(shapes: Sequence[SampleShape], max_tokens: int) -> None:
    faults: list[Fault] = []
    for index, shape in enumerate(shapes):
        if shape.prompt < 1 or shape.response < 1:
            raise TrainError(f"sample {index}: {shape.prompt} prompt and {shape.response} response tokens")
        rows = shape.prompt + shape.response - 1
        if rows > max_tokens:
            reason = f"sample {index} needs {rows} tokens in one micro-batch"
            faults.append(
                Fault("--max-tokens-per-gpu", str(max_tokens), reason, f"set it to at least {rows}")
            )
    if faults:
        raise ConfigError(faults)


def _units(shapes: Sequence[SampleShape], max_tokens: int) -> list[Unit]:
    by_prompt: dict[int, list[Member]] = {}
    prompts: dict[int, int] = {}
    for index, shape in enumerate(shapes):
        by_prompt.setdefault(shape.prompt_number, []).append(Member(index, shape.response))
        prompts[shape.prompt_number] = shape.prompt
    units: list[Unit] = []
    for number, members in by_prompt.items():
        taken: list[Member] = []
        for member in members:
            if taken and prompts[number] + sum(m.tail for m in taken) + member.tail > max_tokens:
                units.append(Unit(prompts[number], tuple(taken)))
                taken = []
            taken.append(member)
        units.append(Unit(prompts[number], tuple(taken)))
    return units


def attention_blocks(micro: MicroBatch) -> tuple[Block, ...]:
    """Blocks that cover every row of the micro-batch once as `own`."""
    blocks: list[Block] = []
    first = 0
    for unit in micro.units:
        blocks += _unit_blocks(unit, first)
        first += unit.rows
    return tuple(blocks)


def _unit_blocks(unit: Unit, first: int) -> list[Block]:
    if len(unit.members) == 1:
        return _causal(Span(first, unit.rows), ())
    prompt = Span(first, unit.prompt)
    blocks = _causal(prompt, ())
    row = first + unit.prompt
    waiting: list[int] = []
    for tail in [m.tail for m in unit.members if m.tail]:
        if waiting and sum(waiting) + tail > TAIL_BLOCK:
            blocks.append(Block(Span(row, sum(waiting)), (prompt,), tuple(waiting)))
            row += sum(waiting)
            waiting = []
        if tail > TAIL_BLOCK:
            blocks += _causal(Span(row, tail), (prompt,))
            row += tail
        else:
            waiting.append(tail)
    if waiting:
        blocks.append(Block(Span(row, sum(waiting)), (prompt,), tuple(waiting)))
    return blocks


def _causal(rows: Span, prefix: tuple[Span, ...]) -> list[Block]:
    """One causal segment, cut into blocks of queries; the rows before a block join its prefix."""
    blocks: list[Block] = []
    for start in range(0, rows.length, QUERY_BLOCK):
        own = min(QUERY_BLOCK, rows.length - start)
        before = (Span(rows.first, start),) if start else ()
        blocks.append(Block(Span(rows.first + start, own), (*prefix, *before), (own,)))
    return blocks
