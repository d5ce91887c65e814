"""The weight map: which elements of the checkpoint every rank of trainer and engines holds, checked. Pure.

Made before the first update from the model's tensors and two topologies. Promises: `problems` names everything that
does not fit (a name without a place, a tensor that a side lacks or has twice, sizes that do not divide, scale
blocks that a rank would cut, a dtype that loses bits) with the nearest candidates; with no problem, every element
of an engine's tensor has exactly one element of the checkpoint, or is padding, and every element of the checkpoint
is on the trainer's side and in each engine, or in a tensor that `trimmed` lists.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnout.core.errors import WeightError
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.map_layouts import lay_out
from turnout.weights.map_rules import EMBEDDING, ROUTER, nearest, rule_of
from turnout.weights.map_types import (
    Block,
    Local,
    Model,
    Param,
    Problem,
    RolloutTopology,
    TrainTopology,
    tiling_fault,
    volume,
)
from turnout.weights.map_units import take_apart
from turnout.weights.tensors import ITEM_BYTES

HEADS = ("lm_head.weight", "output_layer.weight")
FLOAT_WIDTH = {"F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True)
class WeightMap:
    """`source` and `target`: each rank's tensors, of the trainer and of one engine (all are alike). `trimmed`: what
    of the checkpoint or of the trainer goes nowhere, with the reason. `rounded`: engine tensors that hold fewer
    bits than the checkpoint's."""

    model: Model
    trainer: TrainTopology
    rollout: RolloutTopology
    source: list[list[Local]]
    target: list[list[Local]]
    trimmed: list[tuple[str, str]]
    rounded: list[str]
    problems: list[Problem]

    @property
    def params(self) -> dict[str, Param]:
        return {param.name: param for param in self.model.params}

    def checkpoint_names(self, side: str, name: str) -> list[str]:
        """The checkpoint's tensors in a tensor of a side ("trainer" or "engine"), whichever rank has it; raises
        WeightError with the nearest names for one that no rank has."""
        found = _by_name(self._side(side))
        if name not in found:
            raise WeightError(Problem(name, f"no rank of the {side} has it", nearest(name, found)).line())
        local = found[name][0]
        if local.shares or local.scales:
            return self.checkpoint_names(side, local.shares or local.scales)
        return sorted({part.name for each in found[name] for part in each.parts})

    def local_names(self, side: str, name: str) -> list[str]:
        """The other way: the tensors of a side that hold something of a checkpoint's tensor; none where it is
        trimmed. Raises WeightError for a name that the checkpoint lacks."""
        if name not in self.params:
            raise WeightError(Problem(name, "not in the checkpoint", nearest(name, self.params)).line())
        ranks = self._side(side)
        return sorted({local.name for rank in ranks for local in rank for p in local.parts if p.name == name})

    def compare(self, side: str, names: Iterable[str]) -> list[Problem]:
        """What differs between the names that a side should have and those that it says it has."""
        expected, given = set(_by_name(self._side(side))), set(names)
        lacking, strange = sorted(expected - given), sorted(given - expected)
        found = [Problem(n, f"the {side} does not have it", nearest(n, strange)) for n in lacking]
        return found + [
            Problem(n, f"the {side} has it and nothing fills it", nearest(n, lacking)) for n in strange
        ]

    def _side(self, side: str) -> list[list[Local]]:
        return {"trainer": self.source, "engine": self.target}[side]


def make_map(model: Model, trainer: TrainTopology, rollout: RolloutTopology) -> WeightMap:
    """Never raises for what does not fit: see `problems`."""
    parted = take_apart(model)
    problems, trimmed = parted.problems, list(parted.trimmed)
    source: list[list[Local]] = []
    target: list[list[Local]] = []
    if not problems:
        source, wrong = lay_out(model, parted.units, trainer)
        target, also = lay_out(model, parted.units, rollout)
        problems = wrong + also
    rounded: list[str] = []
    if not problems:
        gone = {name for name, _ in trimmed}
        for side, ranks in (("trainer", source), ("engine", target)):
            problems = problems + _coverage(model, ranks, side, gone)
        problems = problems + _scale_faults(target, rollout)
        trimmed += _padding(model, trainer, source)
        rounded, wrong = _rounding(model, target)
        problems = problems + wrong
    return WeightMap(model, trainer, rollout, source, target, trimmed, rounded, problems)


def read_model(folder: Path) -> Model:
    """A checkpoint folder's config.json and the headers of its safetensors files; raises WeightError."""
    try:
        row: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        heads = int(row["num_attention_heads"])
        keys, layers = int(row.get("num_key_value_heads", heads)), int(row["num_hidden_layers"])
        names = ("num_experts", "n_routed_experts", "num_local_experts")
        experts = next((int(row[name]) for name in names if row.get(name)), 0)
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise WeightError(f"{folder / 'config.json'}: not the config of a model: {fault!r}") from fault
    params = tuple(Param(t.name, t.dtype, t.shape) for t in read_checkpoint(folder))
    return Model(params, layers, heads, keys, experts, bool(row.get("tie_word_embeddings", False)))


def unique_blocks(ranks: Sequence[Sequence[Local]]) -> dict[str, dict[Block, int]]:
    """By checkpoint tensor: every different block that some rank holds, and how many ranks do."""
    found: dict[str, dict[Block, int]] = {}
    for rank in ranks:
        for local in rank:
            for part in local.parts:
                blocks = found.setdefault(part.name, {})
                blocks[part.block] = blocks.get(part.block, 0) + 1
    return found


def _by_name(ranks: Sequence[Sequence[Local]]) -> dict[str, list[Local]]:
    found: dict[str, list[Local]] = {}
    for rank in ranks:
        for local in rank:
            found.setdefault(local.name, []).append(local)
    return found


def _coverage(model: Model, ranks: list[list[Local]], side: str, gone: set[str]) -> list[Problem]:
    """Tensors of ranks that are not filled exactly once, and tensors of the checkpoint that a side has not once."""
    found = []
    for local in {id(local): local for rank in ranks for local in rank}.values():
        fault = None if local.shares or local.scales else tiling_fault(
            local.shape, [part.place for part in local.parts] + list(local.padding)
        )  # fmt: skip
        if fault is not None:
            found.append(Problem(f"{side}: {local.name}", fault))
    bodies = [[local for local in rank if not (model.tied and local.name.endswith(HEADS))] for rank in ranks]
    held = unique_blocks(bodies)
    for param in model.params:
        fault = None if param.name in gone else tiling_fault(param.shape, list(held.get(param.name, {})))
        if fault is not None:
            found.append(Problem(f"{side}: {param.name}", fault, nearest(param.name, held)))
    return found + _copy_faults(model, ranks, side)


def _copy_faults(model: Model, ranks: list[list[Local]], side: str) -> list[Problem]:
    """A tied head of its own holds the embedding once more, and may be divided otherwise."""
    heads = [[local for local in rank if local.name.endswith(HEADS)] for rank in ranks]
    if not model.tied:
        return []
    shapes = {param.name: param.shape for param in model.params}
    faults = [
        (name, tiling_fault(shapes[name], list(blocks))) for name, blocks in unique_blocks(heads).items()
    ]
    return [
        Problem(f"{side}: the head's copy of {name}", fault) for name, fault in faults if fault is not None
    ]


def _padding(model: Model, trainer: TrainTopology, source: list[list[Local]]) -> list[tuple[str, str]]:
    names = dict.fromkeys(local.name for rank in source for local in rank if local.padding)
    embedding = next(param for param in model.params if param.name.endswith(EMBEDDING))
    rows = trainer.padded(embedding.shape[0]) - embedding.shape[0]
    return [(name, f"{rows} rows of padding of the trainer's vocabulary") for name in names]


def _scale_faults(target: list[list[Local]], rollout: RolloutTopology) -> list[Problem]:
    """A scale belongs to one block of a whole matrix: a rank's share must begin on a block of its own and of the
    matrix, and only the last block may be short."""
    if rollout.block is None:
        return []
    found: dict[str, Problem] = {}
    scaled = {local.scales for rank in target for local in rank if local.scales}
    for local in (local for rank in target for local in rank if local.name in scaled):
        for part in local.parts:
            starts = [at for at, _ in part.place[-2:]] + [first for first, _ in part.block[-2:]]
            cut = [n for n, size in zip(starts, rollout.block * 2) if n % size]
            if cut:
                sizes = "x".join(map(str, rollout.block))
                why = f"line {cut[0]} lies inside a scale block of {sizes}: a share would begin there"
                found.setdefault(local.name, Problem(f"engine: {local.name}", why))
    return list(found.values())


def _rounding(model: Model, target: list[list[Local]]) -> tuple[list[str], list[Problem]]:
    dtypes = {param.name: param.dtype for param in model.params}
    rounded, wrong = set(), {}
    for local in {id(local): local for rank in target for local in rank}.values():
        for part in local.parts:
            given, held = dtypes[part.name], local.dtype
            if given == held or FLOAT_WIDTH.get(held, 0) > FLOAT_WIDTH.get(given, 8):
                continue
            rule = rule_of(part.name)
            if rule is not None and rule.kind == ROUTER:
                wrong[local.name] = Problem(
                    local.name, f"a router of dtype {given} would be rounded to {held}"
                )
            elif held not in FLOAT_WIDTH or given not in FLOAT_WIDTH:
                wrong[local.name] = Problem(local.name, f"{given} cannot become {held}")
            rounded.add(local.name)
    return sorted(rounded), list(wrong.values())


def bytes_of(local: Local) -> int:
    """Bytes that the rank keeps for it."""
    return (
        volume(tuple((0, side) for side in local.shape)) * ITEM_BYTES[local.dtype] if not local.shares else 0
    )
