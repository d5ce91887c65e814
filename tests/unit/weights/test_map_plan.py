"""The transfer plan: balance, buckets, distance; the way back to the checkpoint for digests; what a report says."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.weight_layouts import engine_rank, numbered, tiny
from turnout.weights.digest import Sums, add, element_sums
from turnout.weights.map import WeightMap, make_map
from turnout.weights.map_digest import NOWHERE, block_sums, part_sums, positions
from turnout.weights.map_plan import plan
from turnout.weights.map_report import diff, kinds, report
from turnout.weights.map_types import (
    RolloutTopology,
    TrainTopology,
    contiguous,
    overlap,
    tiling_fault,
    volume,
)

SGLANG = RolloutTopology(2, 2, layout="sglang")
WIDTHS = [np.uint8, np.uint16, np.uint32, np.uint64]


def test_replicas_share_the_sending_and_buckets_are_bounded():
    found = make_map(tiny(), TrainTopology(dp=4), RolloutTopology(2, 2))
    moves = plan(found, 300)
    assert max(moves.sent.values()) <= 1.1 * min(moves.sent.values())
    for rank in moves.buckets.values():
        for bucket in rank:
            assert sum(move.nbytes for move in bucket) <= 300 or len(bucket) == 1
    assert len({m.source for m in moves.moves}) == 4
    total = sum(math.prod(p.shape) for p in found.model.params) * 2
    norms = sum(math.prod(p.shape) for p in found.model.params if "norm" in p.name) * 2
    for size in moves.received.values():  # half of the model, and what every rank has whole
        assert size == (total - norms) // 2 + norms


def test_the_nearest_holder_sends():
    found = make_map(tiny(), TrainTopology(dp=2), RolloutTopology(2))
    near = plan(found, 1 << 20, lambda source, target: int(source != target[0]))
    assert near.moves and all(engine == move.source for move in near.moves for (engine, _), _ in move.targets)


def test_moves_say_where_elements_do_not_lie_one_after_another():
    found = make_map(tiny(), TrainTopology(), RolloutTopology(1, 2))
    dense = {move.name.split(".")[-2]: move.spot.dense for move in plan(found, 1 << 20).moves}
    assert not dense["o_proj"] and not dense["down_proj"] and dense["q_proj"] and dense["norm"]
    assert (
        contiguous(((1, 1), (2, 3)), (4, 8))
        and not contiguous(((0, 2), (2, 3)), (4, 8))
        and contiguous((), ())
    )


@st.composite
def tilings(draw):
    """A shape and blocks that cover it once: cut in two again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    blocks = [tuple((0, side) for side in shape)]
    for _ in range(draw(st.integers(0, 6))):
        block = blocks.pop(draw(st.integers(0, len(blocks) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        first, count = block[axis]
        at = draw(st.integers(0, count))
        halves = ((first, at), (first + at, count - at))
        blocks += [(*block[:axis], half, *block[axis + 1 :]) for half in halves if half[1]]
    return shape, blocks


@given(tilings(), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_a_tiling_is_known_from_any_other_set_of_blocks(tiling, random):
    shape, blocks = tiling
    random.shuffle(blocks)
    assert tiling_fault(shape, blocks) is None
    assert all(overlap(a, b) is None for i, a in enumerate(blocks) for b in blocks[:i])
    gone = blocks[random.randrange(len(blocks))]
    assert (
        tiling_fault(shape, [b for b in blocks if b is not gone])
        == f"{volume(gone)} elements are not covered"
    )
    assert "covered twice" in str(tiling_fault(shape, [*blocks, gone]))
    outside = ((gone[0][0] + shape[0], gone[0][1]), *gone[1:])
    assert tiling_fault(shape, [*blocks, outside]) == "a block lies outside"


@given(tilings(), st.sampled_from(WIDTHS), st.integers(0, 1 << 30))
@settings(max_examples=200, deadline=None)
def test_the_sums_of_blocks_add_up_to_those_of_the_whole(tiling, width, seed):
    shape, blocks = tiling
    bits = np.random.default_rng(seed).integers(0, np.iinfo(width).max, shape, width, endpoint=True)
    total: Sums = (0, 0)
    for block in blocks:
        part = bits[tuple(slice(first, first + count) for first, count in block)]
        total = add(total, block_sums(np.ascontiguousarray(part).reshape(-1), shape, block))
    assert total == element_sums(bits.reshape(-1))


def maps() -> list[WeightMap]:
    return [
        make_map(tiny(experts=4), TrainTopology(2, 2, ep=2, fsdp=True), SGLANG),
        make_map(tiny(tied=True), TrainTopology(1, 2, 2, layout="megatron"), RolloutTopology(1, 2, 2, 2)),
    ]


@pytest.mark.parametrize("side", ["source", "target"])
def test_every_position_of_a_rank_leads_back_to_the_checkpoint(side):
    for found in maps():
        shapes = {p.name: p.shape for p in found.model.params}
        arrays = numbered(found.model)
        for rank, locals_ in enumerate(getattr(found, side)):
            expected = engine_rank(found.model, found.rollout, rank) if side == "target" else None
            for local in (t for t in locals_ if not t.shares):
                which, home = positions(local, shapes, np.arange(math.prod(local.shape)))
                names = [part.name for part in local.parts]
                got = np.array(
                    [NOWHERE if w < 0 else arrays[names[w]].reshape(-1)[h] for w, h in zip(which, home)]
                )
                assert ((which == NOWHERE) == (home == NOWHERE)).all()
                if expected is not None:
                    assert np.array_equal(got, expected[local.name].reshape(-1)), local.name


def test_the_digest_of_a_tensor_adds_up_from_fused_padded_and_divided_ones():
    """Over one copy of each block: a byte off anywhere in a rank's tensor, padding excepted, shows."""
    found = make_map(tiny(experts=4), TrainTopology(), RolloutTopology(1, 2, ep=2, layout="sglang"))
    shapes = {p.name: p.shape for p in found.model.params}
    arrays = {n: a.astype(np.uint32) for n, a in numbered(found.model).items()}
    ranks = [engine_rank(found.model, found.rollout, rank) for rank in range(2)]

    def sums() -> dict[str, Sums]:
        total: dict[str, Sums] = {}
        for locals_, held in zip(found.target, ranks):
            for local in locals_:
                for name, part in part_sums(held[local.name].astype(np.uint32), local, shapes).items():
                    replicated = {p.block for p in local.parts if p.name == name} == {
                        tuple((0, side) for side in shapes[name])
                    }
                    total[name] = part if replicated else add(total.get(name, (0, 0)), part)
        return total

    right = {name: element_sums(array.reshape(-1)) for name, array in arrays.items()}
    assert sums() == right
    ranks[1]["model.layers.1.mlp.experts.w13_weight"][1, 3, 2] ^= 1  # another expert's, in a fused stack
    assert {n for n, s in sums().items() if s != right[n]} == {
        "model.layers.1.mlp.experts.3.gate_proj.weight"
    }
    ranks[1]["model.layers.1.mlp.experts.w13_weight"][1, 3, 2] ^= 1
    ranks[1]["lm_head.weight"][-1] = 7  # padding
    assert sums() == right


def test_a_change_of_each_size_is_told():
    model = tiny(experts=4, kv_heads=4)
    base = TrainTopology(dp=2, tp=2), RolloutTopology(1, 2, layout="sglang")

    def changes(trainer: TrainTopology, rollout: RolloutTopology) -> list[str]:
        old, new = make_map(model, *base), make_map(model, trainer, rollout)
        assert old.problems == new.problems == []
        return diff(old, new, (plan(old, 1 << 20), plan(new, 1 << 20)))

    trainer, rollout = base
    assert changes(trainer, rollout) == []
    for name in ("dp", "tp", "pp", "cp", "ep"):
        value = getattr(trainer, name)
        lines = changes(replace(trainer, **{name: value % 2 + 1}), rollout)
        assert lines[0] == f"trainer {name}: {value} -> {value % 2 + 1}" and len(lines) > 1
    for name, value in (("engines", 2), ("tp", 1), ("pp", 2), ("dp", 2), ("ep", 2), ("layout", "checkpoint")):
        lines = changes(trainer, replace(rollout, **{name: value}))
        assert lines[0] == f"engines {name}: {getattr(rollout, name)} -> {value}" and len(lines) > 1
    told = changes(trainer, replace(rollout, dp=2))
    assert "query, engine: rows / 2 -> whole, 2 copies" in told


def test_a_report_tells_each_kind_and_each_rank():
    found = make_map(tiny(tied=True, head=True), TrainTopology(2, 2, layout="megatron"), SGLANG)
    moves = plan(found, 512)
    lines = report(found, moves)
    row = next(k for k in kinds(found) if k.name == "query")
    assert (row.tensors, row.trainer, row.engine) == (4, "rows / 2, 2 copies", "rows / 2")
    assert "trimmed  lm_head.weight: tied: the same values as the embedding" in lines
    assert sum(line.startswith("moves    engine") for line in lines) == 4
    full = report(found, moves, full=True)
    assert sum(" -> " in line for line in full) >= len(moves.moves)
    assert any("lm_head.weight BF16 [] = shares model.embed_tokens.weight" in line for line in full)
    broken = make_map(tiny(), TrainTopology(tp=3), SGLANG)
    assert any(line.startswith("problem  trainer: 4 attention heads") for line in report(broken, None))
