"""From checkpoint tensors to what a stock SGLang reports. That the real one agrees is shown by the sglang lane."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest

from turnout.core.errors import WeightError
from turnout.weights.stock_checksums import StockEngine, disagreement, stock_checksums
from turnout.weights.tensors import HostTensor

ENGINE = StockEngine("bfloat16", "cpu")
LAYER = "model.layers.0."


def tensor(name: str, rows: int = 2, start: int = 0, dtype: str = "BF16") -> HostTensor:
    kind = np.uint16 if dtype == "BF16" else np.uint32
    return HostTensor(name, dtype, (rows, 3), np.arange(start, start + 3 * rows, dtype=kind))


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


ATTENTION = [tensor(f"{LAYER}self_attn.{n}_proj.weight", start=10 * at) for at, n in enumerate("qkv")]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_query_key_and_value_are_one_parameter_in_this_order_however_they_come(order):
    sums = stock_checksums([ATTENTION[at] for at in order], ENGINE)
    assert sums == {f"{LAYER}self_attn.qkv_proj.weight": digest(*(t.bits.tobytes() for t in ATTENTION))}


def test_gate_stands_before_up_and_other_tensors_alone():
    up, gate = tensor(f"{LAYER}mlp.up_proj.weight", start=5), tensor(f"{LAYER}mlp.gate_proj.weight")
    router, norm = tensor(f"{LAYER}mlp.gate.weight"), tensor(f"{LAYER}self_attn.q_norm.weight")
    assert stock_checksums([up, gate, router, norm], ENGINE) == {
        f"{LAYER}mlp.gate_up_proj.weight": digest(gate.bits.tobytes(), up.bits.tobytes()),
        router.name: digest(router.bits.tobytes()),
        norm.name: digest(norm.bits.tobytes()),
    }


def test_experts_are_stacked_gate_and_up_of_each_together():
    names = [f"{LAYER}mlp.experts.{e}.{p}_proj.weight" for e in (0, 1) for p in ("gate", "up", "down")]
    parts = {name: tensor(name, start=7 * at) for at, name in enumerate(names)}
    raw = {
        name.split("experts.")[1].removesuffix("_proj.weight"): t.bits.tobytes() for name, t in parts.items()
    }
    assert stock_checksums(reversed(parts.values()), ENGINE) == {
        f"{LAYER}mlp.experts.w13_weight": digest(raw["0.gate"], raw["0.up"], raw["1.gate"], raw["1.up"]),
        f"{LAYER}mlp.experts.w2_weight": digest(raw["0.down"], raw["1.down"]),
    }


def test_a_vocabulary_is_padded_to_64_rows():
    whole, odd = tensor("model.embed_tokens.weight", rows=64), tensor("lm_head.weight", rows=65)
    assert stock_checksums([whole, odd], ENGINE) == {
        whole.name: digest(whole.bits.tobytes()),
        odd.name: digest(odd.bits.tobytes(), bytes(2 * 3 * 63)),
    }


def test_bf16_is_widened_for_a_float32_engine():
    norm = tensor("model.norm.weight", start=0x3F80)
    wide = (norm.bits.astype(np.uint32) << 16).tobytes()
    assert stock_checksums([norm], StockEngine("float32", "cpu")) == {norm.name: digest(wide)}


def test_rounding_is_refused():
    with pytest.raises(WeightError, match=r"model.norm.weight is F32"):
        stock_checksums([tensor("model.norm.weight", start=1, dtype="F32")], ENGINE)


def test_a_part_that_is_missing_or_comes_twice_is_an_error():
    with pytest.raises(WeightError, match=r"qkv_proj\.weight: part 2"):
        stock_checksums(ATTENTION[:2], ENGINE)
    with pytest.raises(WeightError, match=r"q_proj\.weight comes twice"):
        stock_checksums([*ATTENTION, ATTENTION[0]], ENGINE)


def test_every_parameter_must_agree():
    expected = {"a": "1", "b": "2", "lm_head.weight": "3", "model.embed_tokens.weight": "3"}
    tied = {name: value for name, value in expected.items() if name != "lm_head.weight"}
    assert disagreement(expected, expected) is None
    assert disagreement(expected, tied) is None
    assert "1 of its 4 parameters differ: b" in str(disagreement(expected, {**expected, "b": "0"}))
    assert "are missing: a" in str(disagreement(expected, {"b": "2", "model.embed_tokens.weight": "3"}))
    assert "are unknown: c" in str(disagreement(expected, {**expected, "c": "0"}))
    assert "are missing: lm_head" in str(disagreement({**expected, "lm_head.weight": "4"}, tied))
