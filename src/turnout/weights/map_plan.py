"""The transfer plan of a weight map: for each block that an engine's rank needs, which trainer rank sends it. Pure.

Promises: every element of every engine's tensors that is not padding comes in exactly one move, in the dtype in
which the trainer holds it; of the ranks that hold a block, the nearest sends it, and of equally near ones the one
with the fewest bytes so far; a rank's moves go out in buckets of a bounded size, in the checkpoint's order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from turnout.weights.map import WeightMap
from turnout.weights.map_types import Block, Local, Part, contiguous, overlap, volume
from turnout.weights.tensors import ITEM_BYTES

Target = tuple[int, int]  # engine, rank
Distance = Callable[[int, Target], int]


@dataclass(frozen=True)
class Spot:
    """A block of one rank's tensor. `dense`: its elements lie one after another there; else they are copied."""

    tensor: str
    block: Block
    dense: bool


@dataclass(frozen=True)
class Move:
    """`block` of the checkpoint's tensor `name` from one trainer rank to ranks of engines. `nbytes`: once."""

    name: str
    block: Block
    dtype: str
    nbytes: int
    source: int
    spot: Spot
    targets: tuple[tuple[Target, Spot], ...]


@dataclass(frozen=True)
class Plan:
    """`buckets` by trainer rank; `sent` and `received`: bytes by trainer rank and by (engine, rank)."""

    buckets: dict[int, list[list[Move]]]
    sent: dict[int, int]
    received: dict[Target, int]

    @property
    def moves(self) -> list[Move]:
        return [move for rank in self.buckets.values() for bucket in rank for move in bucket]


@dataclass
class _Need:
    """A block, who holds it and who needs it."""

    holders: list[tuple[int, Local, Part]]
    targets: list[tuple[Target, Spot]] = field(default_factory=list)


def plan(found: WeightMap, bucket_bytes: int, distance: Distance = lambda _source, _target: 0) -> Plan:
    """The moves of a map without problems. `bucket_bytes` bounds what a rank sends at a time; a larger block has a
    bucket of its own."""
    needs = _needs(found)
    size = {key: volume(key[1]) * ITEM_BYTES[need.holders[0][1].dtype] for key, need in needs.items()}
    sent = dict.fromkeys(range(len(found.source)), 0)
    received: dict[Target, int] = {}
    chosen: dict[tuple[str, Block], list[Move]] = {}
    for key in sorted(needs, key=lambda k: -size[k]):  # the largest first: the rest evens out
        need, groups = needs[key], {}
        for target, spot in need.targets:
            at = min(
                range(len(need.holders)),
                key=lambda i: (distance(need.holders[i][0], target), sent[need.holders[i][0]]),
            )
            groups.setdefault(at, []).append((target, spot))
            sent[need.holders[at][0]] += size[key]
            received[target] = received.get(target, 0) + size[key]
        chosen[key] = [_move(key, size[key], need.holders[at], tuple(to)) for at, to in groups.items()]
    buckets: dict[int, list[list[Move]]] = {rank: [] for rank in sent}
    held = dict.fromkeys(sent, 0)
    order = {param.name: number for number, param in enumerate(found.model.params)}
    for key in sorted(needs, key=lambda k: (order[k[0]], k[1])):
        for move in chosen[key]:
            mine = buckets[move.source]
            if not mine or held[move.source] + move.nbytes > bucket_bytes:
                mine.append([])
                held[move.source] = 0
            mine[-1].append(move)
            held[move.source] += move.nbytes
    return Plan(buckets, sent, received)


def _needs(found: WeightMap) -> dict[tuple[str, Block], _Need]:
    held: dict[str, dict[Block, list[tuple[int, Local, Part]]]] = {}
    for rank, locals_ in enumerate(found.source):
        for local in locals_:
            for part in local.parts:
                held.setdefault(part.name, {}).setdefault(part.block, []).append((rank, local, part))
    needs: dict[tuple[str, Block], _Need] = {}
    for rank, locals_ in enumerate(found.target):
        for local in locals_:
            for part in local.parts:
                for block, holders in held[part.name].items():
                    common = overlap(block, part.block)
                    if common is None:
                        continue
                    need = needs.setdefault((part.name, common), _Need(holders))
                    spot = _spot(local, part, common)
                    need.targets += [((engine, rank), spot) for engine in range(found.rollout.engines)]
    return needs


def _move(
    key: tuple[str, Block], nbytes: int, holder: tuple[int, Local, Part], to: tuple[tuple[Target, Spot], ...]
) -> Move:
    rank, local, part = holder
    return Move(*key, local.dtype, nbytes, rank, _spot(local, part, key[1]), to)


def _spot(local: Local, part: Part, block: Block) -> Spot:
    inside = part.within(block)
    return Spot(local.name, inside, contiguous(inside, local.shape))
