"""Bytes for each rank: with the slots that a receiver computes they make up the whole tensors again."""

from __future__ import annotations

import numpy as np
import pytest

from turnout.core.errors import WeightError
from turnout.weights.buckets import slots, unpack
from turnout.weights.map_rules import Place, piece
from turnout.weights.slices import rank_bytes, rank_slots
from turnout.weights.tensors import ITEM_BYTES, UNSIGNED, HostTensor

SHAPES = {
    "model.embed_tokens.weight": ("BF16", (12, 6)),
    "model.norm.weight": ("F32", (5,)),  # odd: what follows begins at no multiple of its width
    "model.layers.0.self_attn.q_proj.weight": ("F32", (8, 6)),
    "model.layers.0.self_attn.q_proj.bias": ("U8", (8,)),
    "model.layers.0.self_attn.o_proj.weight": ("BF16", (6, 8)),
    "model.layers.0.mlp.gate.weight": ("F32", (4, 6)),
    "model.layers.0.mlp.experts.1.up_proj.weight": ("BF16", (4, 6)),
    "model.layers.0.mlp.experts.3.down_proj.weight": ("BF16", (6, 4)),
}


def bucket() -> list[HostTensor]:
    random = np.random.default_rng(0)
    made = []
    for name, (dtype, shape) in SHAPES.items():
        kind = UNSIGNED[ITEM_BYTES[dtype]]
        made.append(
            HostTensor(name, dtype, shape, random.integers(0, np.iinfo(kind).max, int(np.prod(shape)), kind))
        )
    return made


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_the_parts_make_up_the_tensors_and_no_rank_gets_more(tp, ep):
    made = bucket()
    described = slots([(t.name, t.dtype, t.shape) for t in made], aligned=False)
    again = {t.name: np.zeros(t.shape, t.bits.dtype) for t in made}
    for rank in range(tp):
        place = Place(rank, tp, ep, 4)
        data = rank_bytes(made, place)
        placed = rank_slots(described, place)
        assert data.size == (placed[-1].end if placed else 0) == sum(s.end - s.start for s in placed)
        for tensor in unpack(data, placed):
            whole = next(t for t in made if t.name == tensor.name)
            part = piece(tensor.name, whole.shape, place)
            assert part is not None
            block = tuple(slice(first, first + count) for first, count in part.block(whole.shape))
            again[tensor.name][block] = tensor.bits.reshape(tensor.shape)
    assert all(np.array_equal(again[t.name].reshape(-1), t.bits) for t in made)


def test_a_tensor_without_a_rule_is_an_error():
    odd = HostTensor("model.layers.0.novel.weight", "U8", (2,), np.zeros(2, np.uint8))
    with pytest.raises(WeightError, match=r"no rule says how model.layers.0.novel.weight"):
        rank_bytes([odd], Place(0, 2))
