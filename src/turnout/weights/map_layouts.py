"""What each rank of a topology holds: names and shapes of its tensors, the blocks of the checkpoint in them. Pure.

Names and orders follow transformers 5, Megatron-core with Transformer Engine (query, key and value interleaved by
query group; gate and up of a rank one after the other; the vocabulary padded to a multiple of 128 x tp) and SGLang
0.5.23 (the rank's queries, then keys, then values; keys and values replicated where there are more ranks than
heads; gate and up likewise; experts stacked). Promises: a model that a topology does not divide is a problem with
its numbers, and then nothing is laid out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from turnout.weights.map_rules import HEAD, ROUTER, RULES, even
from turnout.weights.map_types import (
    ALL,
    Block,
    Local,
    Model,
    Part,
    Problem,
    RolloutTopology,
    Seat,
    Share,
    TrainTopology,
    overlap,
)
from turnout.weights.map_units import Unit

Topology = TrainTopology | RolloutTopology
FLOATS = ("BF16", "F16", "F32")
VOCABULARY = ("embedding", "head")
HEAD_RULE = next(rule for rule in RULES if rule.kind == "head")
DENSE = ("query", "key, value", "attention out", "mlp in", "mlp out", "expert in", "expert out")
QKV = re.compile(r"\.self_attn\.([qkv])_proj\.")
GATE_UP = re.compile(r"\.(gate|up)_proj\.")
EXPERT_LEAF = re.compile(r"\.experts\.(\d+)\.((?:gate|up|down)_proj)\.weight$")
MEGATRON = (
    (r"^model\.embed_tokens\.", "embedding.word_embeddings."),
    (r"^lm_head\.", "output_layer."),
    (r"^model\.norm\.", "decoder.final_layernorm."),
    (r"^model\.layers\.", "decoder.layers."),
    (r"\.self_attn\.o_proj\.", ".self_attention.linear_proj."),
    (r"\.self_attn\.([qk])_norm\.", r".self_attention.\1_layernorm."),
    (r"\.input_layernorm\.", ".self_attention.linear_qkv.layer_norm_"),
    (r"\.shared_expert\.", ".shared_experts."),
    (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.router.expert_bias"),
    (r"\.mlp\.gate\.", ".mlp.router."),
    (r"\.down_proj\.", ".linear_fc2."),
    (r"\.(?:gate|up)_proj\.", ".linear_fc1."),
    (r"\.self_attn\.[qkv]_proj\.", ".self_attention.linear_qkv."),
    (r"\.self_attn\.", ".self_attention."),
)


@dataclass(frozen=True)
class _Cut:
    """A unit's share at one rank: `block` in the unit's own elements. `order` places it among those that share a
    tensor: (expert here, member)."""

    unit: Unit
    block: Block
    order: tuple[int, int]


def lay_out(
    model: Model, units: Sequence[Unit], topology: Topology
) -> tuple[list[list[Local]], list[Problem]]:
    """Every rank's tensors (of one engine), or why there are none."""
    problems = topology.faults() or _indivisible(model, units, topology)
    if problems:
        return [], problems
    known: dict[Seat, list[Local]] = {}  # replicas hold the same
    ranks = []
    for seat in topology.seats():
        if seat not in known:
            known[seat] = _Rank(model, topology, seat).hold(units)
        ranks.append(known[seat])
    return ranks, []


def _indivisible(model: Model, units: Sequence[Unit], topology: Topology) -> list[Problem]:
    seat, where = topology.seats()[0], "trainer" if isinstance(topology, TrainTopology) else "engine"
    vocabulary = next((u.shape[0] for u in units if u.rule.kind == "embedding"), 0)
    ranks = seat.attention[1]
    replicate = isinstance(topology, RolloutTopology) and topology.layout == "sglang"
    keys = ranks if model.kv_heads >= ranks or not replicate else model.kv_heads
    numbers = [
        ("attention heads", model.heads, ranks), ("key and value heads", model.kv_heads, keys),
        ("ranks per key and value head", ranks, keys), ("experts", model.experts, seat.experts[1]),
        ("rows of the padded vocabulary", topology.padded(vocabulary), seat.head[1]),
    ]  # fmt: skip
    if model.layers < seat.stage[1] or (topology.layout == "megatron" and model.layers % seat.stage[1]):
        numbers.append(("layers", model.layers, seat.stage[1]))
    for unit in {u.rule.kind: u for u in units}.values():
        rule = unit.rule
        if rule.axis is not None and rule.kind not in (*VOCABULARY, "key, value"):
            numbers.append((f"{rule.kind} lines", unit.shape[rule.axis], getattr(seat, rule.group)[1]))
    return [
        Problem(where, f"{count} {what} do not divide by {size}")
        for what, count, size in numbers
        if count % size
    ]


class _Rank:
    """Lays out one rank."""

    def __init__(self, model: Model, topology: Topology, seat: Seat) -> None:
        self.model, self.topology, self.seat = model, topology, seat
        self.layers = _stage_layers(model.layers, seat.stage)
        self.tied = model.tied and not topology.untie

    def hold(self, units: Sequence[Unit]) -> list[Local]:
        tensors: dict[str, list[_Cut]] = {}
        sparse = {u.layer for u in units if u.rule.kind == ROUTER}
        for unit in units:
            cut = self._cut(unit)
            if cut is not None:
                tensors.setdefault(self._name(unit, unit.layer in sparse), []).append(cut)
        found = [local for name, cuts in tensors.items() for local in self._tensor(name, cuts)]
        found += self._head_of_embedding(units)
        return [self._rows(local) for local in found]

    def _cut(self, unit: Unit) -> _Cut | None:
        """This rank's share; None: the unit is another rank's."""
        index, size = self.seat.stage
        last, kind = index == size - 1, unit.rule.kind
        if unit.layer is None:
            if not (index == 0 if kind == "embedding" else last):
                return None
        elif unit.layer not in self.layers:
            return None
        member, here = 0, 0
        if unit.expert is not None:
            first, count = even(self.model.experts, *self.seat.experts)
            if not first <= unit.expert < first + count:
                return None
            here = unit.expert - first
        found = QKV.search(unit.name) or GATE_UP.search(unit.name)
        if found is not None:
            member = ("q", "k", "v").index(found[1]) if len(found[1]) == 1 else ("gate", "up").index(found[1])
        return _Cut(unit, self._block(unit), (here, member))

    def _block(self, unit: Unit) -> Block:
        block, rule = [(0, side) for side in unit.shape], unit.rule
        if rule.axis is None:
            return tuple(block)
        index, size = share = getattr(self.seat, rule.group)
        if rule.kind == "key, value" and size > self.model.kv_heads:
            share = (index * self.model.kv_heads // size, self.model.kv_heads)
        lines = unit.shape[rule.axis]
        if rule.kind in VOCABULARY:
            first, count = even(self.topology.padded(lines), *share)
            block[0] = (min(first, lines), max(0, min(first + count, lines) - first))
        else:
            block[rule.axis] = even(lines, *share)
        return tuple(block)

    def _name(self, unit: Unit, sparse: bool) -> str:
        name, layout = unit.name, self.topology.layout
        expert = EXPERT_LEAF.search(name)
        here = 0 if expert is None else int(expert[1]) - even(self.model.experts, *self.seat.experts)[0]
        if layout == "checkpoint":
            return name
        if layout == "megatron":
            after = ".pre_mlp_layernorm." if sparse else ".mlp.linear_fc1.layer_norm_"
            for pattern, put in (*MEGATRON, (r"\.post_attention_layernorm\.", after)):
                name = re.sub(pattern, put, name)
            if unit.layer is not None:
                name = name.replace(f".layers.{unit.layer}.", f".layers.{unit.layer - self.layers.start}.")
            return re.sub(r"\.experts\.\d+\.(.*)$", rf".experts.\g<1>{here}", name)
        if expert is not None:
            fused = expert[2] != "down_proj"
            leaf = ("gate_up_proj", "down_proj") if layout == "transformers" else ("w13_weight", "w2_weight")
            return EXPERT_LEAF.sub(f".experts.{leaf[0] if fused else leaf[1]}", name)
        if layout == "sglang":
            name = GATE_UP.sub(".gate_up_proj.", QKV.sub(".self_attn.qkv_proj.", name))
        return name

    def _tensor(self, name: str, cuts: list[_Cut]) -> list[Local]:
        unit = cuts[0].unit
        if unit.rule.kind in VOCABULARY:
            local = self._vocabulary(name, unit, cuts[0].block)
        elif EXPERT_LEAF.search(unit.name) and self.topology.layout in ("transformers", "sglang"):
            local = self._stack(name, cuts)
        elif self.topology.layout == "megatron" and QKV.search(unit.name):
            local = self._groups(name, cuts)
        else:
            local = self._one_after_another(name, cuts)
        if not isinstance(self.topology, RolloutTopology) or self.topology.block is None:
            return [local]
        if unit.rule.kind not in DENSE or len(unit.shape) != 2:
            return [local]
        rows, columns = self.topology.block
        shape = (*local.shape[:-2], -(-local.shape[-2] // rows), -(-local.shape[-1] // columns))
        scale = Local(f"{name}_scale_inv", "F32", shape, (), scales=name)
        return [replace(local, dtype="F8_E4M3"), scale]

    def _vocabulary(self, name: str, unit: Unit, block: Block) -> Local:
        rows = self.topology.padded(unit.shape[0]) // getattr(self.seat, unit.rule.group)[1]
        real, width = block[0][1], unit.shape[1:]
        parts = (Part(unit.home, _at_home(unit, block), (0,) * len(unit.shape)),) if real else ()
        padding = (((real, rows - real), *((0, side) for side in width)),) if real < rows else ()
        return Local(name, self._dtype(unit), (rows, *width), parts, padding)

    def _one_after_another(self, name: str, cuts: list[_Cut]) -> Local:
        parts, at = [], 0
        for cut in sorted(cuts, key=lambda c: c.order):
            rest = (0,) * (len(cut.block) - 1)
            parts.append(Part(cut.unit.home, _at_home(cut.unit, cut.block), (at, *rest) if cut.block else ()))
            at += cut.block[0][1] if cut.block else 0
        sides = tuple(count for _, count in cuts[0].block[1:])
        return Local(name, self._dtype(cuts[0].unit), (at, *sides) if cuts[0].block else (), tuple(parts))

    def _stack(self, name: str, cuts: list[_Cut]) -> Local:
        parts, at = [], dict.fromkeys((cut.order[0] for cut in cuts), 0)
        for cut in sorted(cuts, key=lambda c: c.order):
            expert = cut.order[0]
            parts.append(Part(cut.unit.home, _at_home(cut.unit, cut.block), (expert, at[expert], 0)))
            at[expert] += cut.block[0][1]
        shape = (len(at), at[0], cuts[0].block[1][1])
        return Local(name, self._dtype(cuts[0].unit), shape, tuple(parts))

    def _groups(self, name: str, cuts: list[_Cut]) -> Local:
        """For each query group its queries, its key, its value."""
        groups = self.model.kv_heads // self.seat.attention[1]
        parts, at = [], 0
        for group in range(groups):
            for cut in sorted(cuts, key=lambda c: c.order):
                (first, count), *rest = cut.block
                start, rows = even(count, group, groups)
                block = ((first + start, rows), *rest)
                parts.append(Part(cut.unit.home, _at_home(cut.unit, block), (at, *(0 for _ in rest))))
                at += rows
        sides = tuple(count for _, count in cuts[0].block[1:])
        return Local(name, self._dtype(cuts[0].unit), (at, *sides), tuple(parts))

    def _head_of_embedding(self, units: Sequence[Unit]) -> list[Local]:
        """The head of a tied model: the embedding's own memory, or a copy on the last stage or where untied."""
        index, size = self.seat.stage
        if not self.model.tied or index != size - 1:
            return []
        embedding = next(u for u in units if u.rule.kind == "embedding")
        head = replace(embedding, name=HEAD, rule=HEAD_RULE)
        name = self._name(head, False)
        if self.tied and size == 1:
            return [Local(name, self._dtype(head), (), (), shares=self._name(embedding, False))]
        return [self._vocabulary(name, head, self._block(head))]

    def _dtype(self, unit: Unit) -> str:
        chosen = self.topology.dtype
        return chosen if chosen and unit.dtype in FLOATS and unit.rule.kind != ROUTER else unit.dtype

    def _rows(self, local: Local) -> Local:
        """What FSDP leaves this rank of a tensor: an equal number of lines of the first axis, as torch.chunk."""
        expert = ".experts." in local.name and ".shared_experts." not in local.name
        index, size = self.seat.expert_rows if expert else self.seat.rows
        if (index, size) == ALL or not local.shape:
            return local
        lines = -(-local.shape[0] // size)
        first = min(index * lines, local.shape[0])
        count = min(lines, local.shape[0] - first)
        mine = ((first, count), *((0, side) for side in local.shape[1:]))
        parts = tuple(p for part in local.parts if (p := _within(part, mine)) is not None)
        return replace(local, shape=(count, *local.shape[1:]), parts=parts)


def _within(part: Part, mine: Block) -> Part | None:
    """What of a part lies in this block of its tensor, told from the block's start on."""
    kept = overlap(part.place, mine)
    if kept is None:
        return None
    skip = [first - at for (first, _), at in zip(kept, part.at)]
    lead = len(part.block) - len(kept)
    block = list(part.block)
    for axis, ((_, count), skipped) in enumerate(zip(kept, skip)):
        if axis + lead >= 0:
            block[axis + lead] = (part.block[axis + lead][0] + skipped, count)
    return Part(part.name, tuple(block), tuple(first - start for (first, _), (start, _) in zip(kept, mine)))


def _at_home(unit: Unit, block: Block) -> Block:
    lead = len(unit.at) - len(block)
    return (*((at, 1) for at in unit.at[:lead]), *((at + f, n) for at, (f, n) in zip(unit.at[lead:], block)))


def _stage_layers(layers: int, stage: Share) -> range:
    """As SGLang divides them: the last stages have one more where it does not come out even."""
    index, size = stage
    base, extra = divmod(layers, size)
    first = index * base + max(0, index - (size - extra))
    return range(first, first + base + (index >= size - extra))
