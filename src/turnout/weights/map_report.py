"""The weight map in words: what `turnout weights map` prints, and what changed between two maps. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from turnout.weights.map import WeightMap, bytes_of, unique_blocks
from turnout.weights.map_plan import Plan
from turnout.weights.map_rules import rule_of
from turnout.weights.map_types import Block, Param, RolloutTopology, TrainTopology, show, volume, whole
from turnout.weights.tensors import ITEM_BYTES

SHOWN = 20
AXES = ("rows", "columns")


@dataclass(frozen=True)
class Kind:
    """All tensors of one kind: how many, their bytes, and how each side divides one of them."""

    name: str
    tensors: int
    nbytes: int
    trainer: str
    engine: str


def report(found: WeightMap, moves: Plan | None, full: bool = False) -> list[str]:
    """The lines to print; `moves` None where there are problems. `full` adds a line for each tensor and rank."""
    lines = [_topology("trainer", found.trainer), _topology("engines", found.rollout)]
    lines += [f"problem  {problem.line()}" for problem in found.problems[: None if full else SHOWN]]
    if len(found.problems) > SHOWN and not full:
        lines.append(f"problem  and {len(found.problems) - SHOWN} more; --full shows all")
    if moves is None:
        return lines
    lines += ["", f"{'kind':16} {'tensors':>7} {'MB':>10}  {'trainer':30} engine"]
    lines += [
        f"{k.name:16} {k.tensors:7} {k.nbytes / 1e6:10.3f}  {k.trainer:30} {k.engine}" for k in kinds(found)
    ]
    lines += ["", *(f"trimmed  {name}: {why}" for name, why in found.trimmed)]
    if found.rounded:
        lines.append(
            f"rounded  {len(found.rounded)} engine tensors hold fewer bits, such as {found.rounded[0]}"
        )
    lines += _bytes(found, moves)
    if full:
        lines += ["", *_tensors(found, moves)]
    return lines


def kinds(found: WeightMap) -> list[Kind]:
    """One per kind of tensor, in the checkpoint's order."""
    gone = {name for name, _ in found.trimmed}
    groups: dict[str, list[Param]] = {}
    for param in found.model.params:
        if param.name not in gone:
            groups.setdefault(_kind(param.name), []).append(param)
    source, target = unique_blocks(found.source), unique_blocks(found.target)
    rows = []
    for name, params in groups.items():
        size = sum(volume(whole(p.shape)) * ITEM_BYTES[p.dtype] for p in params)
        sides = [_distinct([_division(p, held.get(p.name, {})) for p in params]) for held in (source, target)]
        rows.append(Kind(name, len(params), size, *sides))
    return rows


def diff(before: WeightMap, after: WeightMap, plans: tuple[Plan, Plan]) -> list[str]:
    """What a change of topology changes, a line each; empty: nothing."""
    lines = []
    for side, old, new in (
        ("trainer", before.trainer, after.trainer), ("engines", before.rollout, after.rollout),
    ):  # fmt: skip
        changed = [f for f in fields(old) if getattr(old, f.name) != getattr(new, f.name)]
        lines += [f"{side} {f.name}: {getattr(old, f.name)} -> {getattr(new, f.name)}" for f in changed]
    old_kinds = {kind.name: kind for kind in kinds(before)}
    for kind in kinds(after):
        old_kind = old_kinds.get(kind.name)
        for side in ("trainer", "engine"):
            was, now = getattr(old_kind, side, "not there"), getattr(kind, side)
            if was != now:
                lines.append(f"{kind.name}, {side}: {was} -> {now}")
    lines += [f"no longer trimmed: {n}: {why}" for n, why in before.trimmed if (n, why) not in after.trimmed]
    lines += [f"newly trimmed: {n}: {why}" for n, why in after.trimmed if (n, why) not in before.trimmed]
    was_names, now_names = ({local.name for rank in m.target for local in rank} for m in (before, after))
    for what, names in (
        ("no longer in an engine", was_names - now_names),
        ("new in an engine", now_names - was_names),
    ):
        if names:
            lines.append(f"{what}: {len(names)} tensors, such as {min(names)}")
    for what, old_bytes, new_bytes in (
        ("sent by the busiest trainer rank", *(max(p.sent.values()) for p in plans)),
        ("received by the busiest engine rank", *(max(p.received.values()) for p in plans)),
    ):
        if old_bytes != new_bytes:
            lines.append(f"{what}: {old_bytes / 1e6:.3f} -> {new_bytes / 1e6:.3f} MB")
    return lines


def _topology(side: str, topology: TrainTopology | RolloutTopology) -> str:
    values = {f.name: getattr(topology, f.name) for f in fields(topology)}
    shown = [f"{name} {value}" for name, value in values.items() if value not in (None, "", False)]
    return f"{side:8} {', '.join(shown)}"


def _kind(name: str) -> str:
    rule = rule_of(name)
    if rule is not None:
        return rule.kind
    return "experts" if ".experts." in name else "fused in"


def _division(param: Param, held: dict[Block, int]) -> str:
    """How one tensor is divided, as in `rows / 2, 4 copies`."""
    if not held:
        return "nowhere"
    matrix = max(0, len(param.shape) - len(AXES))  # the axes before the last two are of stacks
    axes = [i for i, side in enumerate(param.shape) if any(block[i] != (0, side) for block in held)]
    names = [AXES[i - matrix] if i >= matrix else "experts" for i in axes]
    text = f"{' and '.join(names)} / {len(held)}" if axes else "whole"
    copies = sorted({min(held.values()), max(held.values())})
    return text if copies == [1] else f"{text}, {' to '.join(map(str, copies))} copies"


def _distinct(texts: list[str]) -> str:
    found = list(dict.fromkeys(texts))
    return found[0] if len(found) == 1 else f"{found[0]} (some: {found[1]})"


def _bytes(found: WeightMap, moves: Plan) -> Iterator[str]:
    copied = sum(
        not spot.dense for move in moves.moves for spot in (move.spot, *(s for _, s in move.targets))
    )
    count, buckets = len(moves.moves), sum(len(rank) for rank in moves.buckets.values())
    total = sum(move.nbytes for move in moves.moves)
    yield f"moves    {count} blocks in {buckets} buckets, {total / 1e6:.3f} MB; {copied} ends are not dense"
    for rank, size in moves.sent.items():
        yield f"moves    trainer rank {rank} sends {size / 1e6:.3f} MB in {len(moves.buckets[rank])} buckets"
    gone = {name for name, _ in found.trimmed}
    model = sum(
        volume(whole(p.shape)) * ITEM_BYTES[p.dtype] for p in found.model.params if p.name not in gone
    )
    for (engine, rank), size in sorted(moves.received.items()):
        kept = sum(bytes_of(local) for local in found.target[rank])
        share = f"{size / model:.1%} of the model" if model else "-"
        yield (
            f"moves    engine {engine} rank {rank} receives {size / 1e6:.3f} MB ({share}), "
            f"keeps {kept / 1e6:.3f} MB"
        )


def _tensors(found: WeightMap, moves: Plan) -> Iterator[str]:
    for rank, locals_ in enumerate(found.target):
        for local in locals_:
            made = (
                f"shares {local.shares}"
                if local.shares
                else f"scales of {local.scales}"
                if local.scales
                else ""
            )
            parts = [f"{p.name}{show(p.block)}" for p in local.parts] + [
                f"padding{show(b)}" for b in local.padding
            ]
            of = made or " + ".join(parts)
            yield f"engine rank {rank}  {local.name} {local.dtype} {list(local.shape)} = {of}"
    for move in moves.moves:
        to = ", ".join(
            f"engine {e} rank {r} {spot.tensor}{show(spot.block)}" for (e, r), spot in move.targets
        )
        spot = f"{move.spot.tensor}{show(move.spot.block)}"
        yield f"trainer rank {move.source}  {spot} {move.dtype} {move.nbytes} B -> {to}"
