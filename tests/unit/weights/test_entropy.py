"""The coder of `packed` and `ranked`: C and reference write the same bytes, hostile bytes, sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from turnout.core.errors import WeightError
from turnout.native.loader import library
from turnout.weights.changes import Bits, Change, collect
from turnout.weights.codecs import packed
from turnout.weights.codecs.ans import CHANGES_PER_TABLE, SLOTS, SYMBOLS, fit, normalised, parse
from turnout.weights.codecs.classes import Classes, Split, merge
from turnout.weights.codecs.codec import Encoded, Head
from turnout.weights.codecs.registry import CODECS
from turnout.weights.tensors import ITEM_BYTES, UNSIGNED, HostTensor

NAMES = ("packed", "ranked")
needs_compiler = pytest.mark.skipif(library() is None, reason="no C compiler: there is only the reference")


def pair(dtype: str, elements: int, density: float, seed: int) -> tuple[Change, Bits]:
    """Normal weights in a floating dtype, any bits in another; changes of mostly one unit, some of any size."""
    rng = np.random.default_rng(seed)
    kind = UNSIGNED[ITEM_BYTES[dtype]]
    base = rng.integers(0, 256, (elements, kind().itemsize), np.uint8).view(kind).reshape(-1)
    if dtype == "BF16":
        base = (rng.normal(0, 0.05, elements).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = base.copy()
    moved = rng.random(elements) < density
    new[moved] += rng.choice(np.array([1, np.iinfo(kind).max], kind), moved.sum())
    wild = rng.random(elements) < density / 20
    new[wild] = rng.integers(0, 256, (wild.sum(), kind().itemsize), np.uint8).view(kind).reshape(-1)
    return collect(base, HostTensor(f"{dtype}.{seed}", dtype, (elements,), new)), base


def mixture() -> list[tuple[Change, Bits]]:
    """Every dtype, empty to dense, blocks of the C file's size met exactly and missed by one."""
    sizes = [(1, 1.0), (5, 0.5), (1023, 0.01), (1024, 0.2), (1025, 1.0), (5000, 0.003), (3000, 0.0), (0, 0.0)]
    return [pair(d, n, p, at) for at, d in enumerate(ITEM_BYTES) for n, p in sizes]


def head_of(change: Change) -> Head:
    return Head(change.name, change.dtype, change.shape, change.count)


def decoded(name: str, encoded: Encoded, items: list[tuple[Change, Bits]]) -> list[Change]:
    decode = CODECS[name].decoder(encoded.shared)
    return [decode(part, head_of(change), base) for part, (change, base) in zip(encoded.parts, items)]


def same(left: Change, right: Change) -> bool:
    positions = left.positions.dtype == right.positions.dtype and np.array_equal(
        left.positions, right.positions
    )
    return positions and left.bits.dtype == right.bits.dtype and np.array_equal(left.bits, right.bits)


@needs_compiler
@pytest.mark.parametrize("name", NAMES)
def test_c_and_reference_write_the_same_bytes_and_read_each_other(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = mixture()
    native = CODECS[name].encode(items)
    assert all(same(found, change) for found, (change, _) in zip(decoded(name, native, items), items))
    monkeypatch.setattr(packed, "library", lambda: None)
    slow = CODECS[name].encode(items)
    assert slow.shared.tobytes() == native.shared.tobytes()
    assert [part.tobytes() for part in slow.parts] == [part.tobytes() for part in native.parts]
    assert all(same(found, change) for found, (change, _) in zip(decoded(name, native, items), items))


@pytest.mark.parametrize("dtype", ["BF16", "F64", "U8"])
@pytest.mark.parametrize("name", NAMES)
def test_altered_parts_are_refused_or_stay_inside(name: str, dtype: str) -> None:
    items = [pair(dtype, 3000, 0.05, 3)]
    encoded, change, base = CODECS[name].encode(items), *items[0]
    decode = CODECS[name].decoder(encoded.shared)
    rng = np.random.default_rng(0)
    part, accepted = encoded.parts[0], 0
    hostile = [part[:cut] for cut in range(0, len(part), 3)] + [np.append(part, np.uint8(0))]
    for _ in range(1500):
        altered = part.copy()
        altered[rng.integers(len(part), size=rng.integers(1, 4))] ^= np.uint8(1 << rng.integers(8))
        hostile.append(altered)
    hostile += [rng.integers(0, 256, rng.integers(0, 200)).astype(np.uint8) for _ in range(500)]
    for bytes_ in hostile:
        try:
            found = decode(bytes_, head_of(change), base)
        except WeightError:
            continue
        accepted += 1
        assert found.count == change.count
        assert np.all(found.positions[1:] > found.positions[:-1])
        assert 0 <= found.positions[0] <= found.positions[-1] < change.elements
        assert not same(found, change) or np.array_equal(bytes_, part)
    assert accepted < len(hostile) / 3, "most damage shows in the coder's final state"


@needs_compiler
@pytest.mark.parametrize("name", NAMES)
def test_c_and_reference_refuse_the_same_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [pair("BF16", 900, 0.05, 5)]
    encoded, change, base = CODECS[name].encode(items), *items[0]
    rng, hostile = np.random.default_rng(1), list[np.ndarray]()
    for _ in range(300):
        altered = encoded.parts[0].copy()
        altered[rng.integers(len(altered))] ^= np.uint8(1 << rng.integers(8))
        hostile.append(altered)

    def verdicts() -> list[bytes]:
        decode, out = CODECS[name].decoder(encoded.shared), list[bytes]()
        for part in hostile:
            try:
                found = decode(part, head_of(change), base)
                out.append(found.positions.tobytes() + found.bits.tobytes())
            except WeightError:
                out.append(b"refused")
        return out

    fast = verdicts()
    monkeypatch.setattr(packed, "library", lambda: None)
    assert verdicts() == fast
    assert b"refused" in fast


def test_parts_of_another_tensor_base_or_count_are_refused() -> None:
    items = [pair("BF16", 3000, 0.05, 1), pair("BF16", 2999, 0.05, 2)]
    encoded = CODECS["ranked"].encode(items)
    decode = CODECS["ranked"].decoder(encoded.shared)
    (change, base), (_, other) = items
    for part, head, bits in [
        (encoded.parts[0], head_of(change), None),
        (encoded.parts[0], head_of(change), other),
        (encoded.parts[0], head_of(change), base.astype(np.uint32)),
        (encoded.parts[0], Head("t", "BF16", (3000,), change.count - 1), base),
        (encoded.parts[0], Head("t", "BF16", (3000,), 3001), base),
        (encoded.parts[0], Head("t", "BF16", (3000,), 0), base),
        (encoded.parts[1], head_of(change), base),
        (encoded.parts[0][:0], head_of(change), base),
        (encoded.parts[0], head_of(change), np.zeros_like(base)),
    ]:
        with pytest.raises(WeightError):
            decode(part, head, bits)
    with pytest.raises(WeightError, match="without the tables"):
        CODECS["ranked"].decoder(np.zeros(0, np.uint8))(encoded.parts[0], head_of(change), base)


def test_altered_tables_are_refused_or_decode_inside() -> None:
    items = [pair("BF16", 6000, 0.05, 1)]
    encoded, (change, base) = CODECS["ranked"].encode(items), items[0]
    refused = 0
    for at in range(len(encoded.shared)):
        for cut in (False, True):
            shared = encoded.shared.copy()
            shared[at] ^= np.uint8(1 << at % 8)
            try:
                decode = CODECS["ranked"].decoder(shared[:at] if cut else shared)
                found = decode(encoded.parts[0], head_of(change), base)
            except WeightError:
                refused += 1
                continue
            assert not same(found, change)
            assert np.all(found.positions < change.elements)
    assert refused > len(encoded.shared)


def test_a_rank_that_overflows_is_outside() -> None:
    gaps = np.array([2**62, 2**62, 2**62, 2**62], np.int64)
    parts = Split(np.array([4]), gaps, np.ones(4, np.uint8))
    with pytest.raises(WeightError):
        merge(np.zeros(10, np.uint8), Classes(0, 0, 0, 1), parts)


def test_strided_arrays_are_read_as_what_they_are() -> None:
    change, base = pair("BF16", 2000, 0.05, 9)
    twice = np.repeat(base, 2)[::2]
    strided = Change(
        change.name,
        change.dtype,
        change.shape,
        np.repeat(change.positions, 2)[::2],
        np.repeat(change.bits, 2)[::2],
    )
    for name in NAMES:
        encoded = CODECS[name].encode([(strided, twice)])
        assert encoded.parts[0].tobytes() == CODECS[name].encode([(change, base)]).parts[0].tobytes()
        assert same(decoded(name, encoded, [(change, twice)])[0], change)


def test_positions_beyond_2_to_the_31() -> None:
    """A tensor of 2^31 + 10 elements, of which three change; the base takes no memory."""
    elements = (1 << 31) + 10
    positions = np.array([7, 1 << 31, elements - 1], np.int64)
    change = Change("wide", "F8_E4M3", (elements,), positions, np.ones(3, np.uint8))
    items = [(change, np.zeros(elements, np.uint8))]
    for name in NAMES:
        assert same(decoded(name, CODECS[name].encode(items), items)[0], change)


def test_tables_come_back_from_their_bytes_and_hold_every_symbol() -> None:
    rng = np.random.default_rng(0)
    histograms = rng.geometric(0.01, (40, SYMBOLS)) * (rng.random((40, SYMBOLS)) < 0.4) * CHANGES_PER_TABLE
    histograms[3] = np.eye(SYMBOLS, dtype=np.int64)[255]
    frequencies, chosen = fit(histograms)
    assert np.all(frequencies.sum(axis=1) == SLOTS)
    assert len(frequencies) > 1
    for item, table in zip(histograms, chosen.tolist()):
        assert np.all(frequencies[table][item > 0] > 0)
    assert normalised(np.r_[1, 10**6, np.zeros(254, np.int64)]).tolist()[:2] == [1, SLOTS - 1]
    encoded = CODECS["ranked"].encode([pair("BF16", 9000, 0.3, 4)])
    assert parse(encoded.shared).to_bytes().tobytes() == encoded.shared.tobytes()


def test_uniform_changes_cost_little_more_than_the_bound() -> None:
    """One bit of sign a change, and log2 of how many ways there are to choose the positions."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 1 << 16, 400_000).astype(np.uint16)
    new = base.copy()
    at = rng.choice(base.size, 4000, replace=False)
    new[at] += rng.choice([1, 0xFFFF], 4000).astype(np.uint16)
    items = [(collect(base, HostTensor("t", "U16", base.shape, new)), base)]
    ways = math.lgamma(base.size + 1) - math.lgamma(4001) - math.lgamma(base.size - 3999)
    bound = (ways / math.log(2) + 4000) / 8
    assert bound <= CODECS["packed"].encode(items).nbytes < 1.03 * bound


def test_ranked_uses_that_the_exponent_tells_where_changes_are() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(0, 0.05, 300_000).astype(np.float32)
    base = (values.view(np.uint32) >> 16).astype(np.uint16)
    step = np.exp2(np.floor(np.log2(np.abs(values))) - 7)  # a bf16 weight's last bit
    new = base.copy()
    new[rng.random(base.size) < 1e-6 / step] += np.uint16(1)
    items = [(collect(base, HostTensor("t", "BF16", base.shape, new)), base)]
    assert CODECS["ranked"].encode(items).nbytes < 0.78 * CODECS["packed"].encode(items).nbytes
