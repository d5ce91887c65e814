"""Every encoding gives back what was encoded, bit for bit, and damaged bytes never more than an error or a change
inside the tensor that a digest refuses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from turnout.core.errors import WeightError
from turnout.native.loader import library
from turnout.weights import changes
from turnout.weights.changes import Bits, Change, compare, overwrite
from turnout.weights.codecs import deltas
from turnout.weights.codecs.codec import Encoded, Head
from turnout.weights.codecs.registry import CODECS, codec
from turnout.weights.digest import add, element_sums
from turnout.weights.tensors import ITEM_BYTES, UNSIGNED, HostTensor

States = tuple[Bits, HostTensor]  # the bits before, the tensor after
# zeros of both signs, ones, infinities, NaN payloads and subnormals of bf16, fp16 and fp32, as bytes
SPECIAL = [0x00, 0x80, 0x3F, 0xBF, 0x7F, 0xFF, 0x7C, 0xFC, 0x01, 0xC0, 0x7E, 0x81]


@st.composite
def states(draw: st.DrawFn) -> States:
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    width = ITEM_BYTES[dtype]
    shape = draw(st.sampled_from([(), (0,), (3, 0), (1,), (7,), (64,), (5, 13), (40, 50), (70_001,)]))
    count, rng = math.prod(shape), np.random.default_rng(draw(st.integers(0, 2**32)))
    table = np.array(draw(st.sampled_from([SPECIAL, [0], list(range(256))])), np.uint8)
    if dtype == "BOOL":
        table = np.array([0, 1], np.uint8)
    before, after = (rng.choice(table, count * width).view(UNSIGNED[width]) for _ in range(2))
    pattern = draw(st.sampled_from(["none", "all", "some", "few", "run", "ends"]))
    chosen = np.zeros(count, bool)
    if pattern == "all":
        chosen[:] = True
        after = before ^ before.dtype.type(1)  # each one, in its last bit
    elif pattern in ("some", "few"):
        chosen = rng.random(count) < (0.3 if pattern == "some" else 0.001)
    elif pattern == "run":
        chosen[count // 3 : count // 2] = True
    elif pattern == "ends":
        chosen[:1] = chosen[-1:] = True
    return before, HostTensor(f"w{draw(st.integers())}", dtype, shape, np.where(chosen, after, before))


def head(change: Change) -> Head:
    return Head(change.name, change.dtype, change.shape, change.count)


def encoded(name: str, pairs: Sequence[States]) -> tuple[list[Change], Encoded]:
    found = [change for change, _ in compare(pairs)]
    return found, codec(name).encode([(change, base) for change, (base, _) in zip(found, pairs)])


def copied(data: Any) -> Any:
    """Bytes as a reader has them: elsewhere, and read-only."""
    return np.frombuffer(data.tobytes(), np.uint8)


def check_round_trip(name: str, pairs: Sequence[States]) -> None:
    kept = [base.copy() for base, _ in pairs]
    found, made = encoded(name, pairs)
    decode = codec(name).decoder(copied(made.shared))
    for change, part, base, (before, after) in zip(found, made.parts, kept, pairs, strict=True):
        np.testing.assert_array_equal(before, base)  # encoding leaves the base as it is
        again = decode(copied(part), head(change), base if codec(name).needs_base else None)
        assert (again.name, again.dtype, again.shape) == (after.name, after.dtype, after.shape)
        assert again.positions.dtype == change.positions.dtype and again.bits.dtype == change.bits.dtype
        np.testing.assert_array_equal(again.positions, change.positions)
        np.testing.assert_array_equal(again.bits, change.bits)
        overwrite(base, again)
        np.testing.assert_array_equal(base, after.bits)


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=50, deadline=None)
@given(pairs=st.lists(states(), max_size=4))
def test_what_is_decoded_is_what_was_encoded(name: str, pairs: list[States]) -> None:
    check_round_trip(name, pairs)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("name", CODECS)
def test_every_dtype_with_every_pattern_of_bytes(name: str, dtype: str) -> None:
    width = ITEM_BYTES[dtype]
    rng = np.random.default_rng(width)
    before = rng.integers(0, 256, 200_000 * width, np.uint8).view(UNSIGNED[width])
    after = before.copy()
    chosen = rng.random(before.size) < 0.02
    after[chosen] = rng.integers(0, 256, before.nbytes, np.uint8).view(UNSIGNED[width])[chosen]
    small = HostTensor("small", dtype, (3,), after[:3] ^ before.dtype.type(1))
    check_round_trip(name, [(before, HostTensor("w", dtype, (400, 500), after)), (before[:3], small)])


@pytest.mark.parametrize("name", CODECS)
def test_a_tensor_of_more_than_2_to_the_31_elements(name: str) -> None:
    """Zero pages: almost no memory is used."""
    elements = 2**31 + 70_000
    before, after = np.zeros(elements, np.uint8), np.zeros(elements, np.uint8)
    places = [0, 1, 65_535, 2**30, 2**31 - 1, 2**31, 2**31 + 65_537, elements - 1]
    after[places] = range(1, 9)
    found, made = encoded(name, [(before, HostTensor("w", "U8", (2, elements // 2), after))])
    assert found[0].positions.dtype == np.int64 and found[0].positions.tolist() == places
    part = codec(name).decoder(made.shared)(made.parts[0], head(found[0]), before)
    assert part.positions.dtype == np.int64 and part.positions.tolist() == places
    assert part.bits.tolist() == list(range(1, 9))
    assert made.nbytes < 1_000_000


def example(name: str, count: int = 3000) -> tuple[States, Change, Encoded]:
    rng = np.random.default_rng(5)
    before = rng.normal(0, 0.02, count).astype(np.float32).view(np.uint32) >> np.uint32(16)
    before = before.astype(np.uint16)
    after = before.copy()
    after[rng.random(count) < 0.05] += np.uint16(1)
    pair = before, HostTensor("w", "BF16", (count,), after)
    found, made = encoded(name, [pair])
    return pair, found[0], made


def attempt(name: str, shared: Any, part: Any, what: Head, before: Bits) -> Change | None:
    """The change that damaged bytes give, checked for what is promised of it; None where they are refused."""
    try:
        change = codec(name).decoder(shared)(part, what, before)
    except WeightError:
        return None
    assert change.count == what.count and change.bits.shape == change.positions.shape
    assert change.bits.dtype == before.dtype
    if change.count:
        assert change.positions[0] >= 0 and change.positions[-1] < before.size
        assert np.all(np.diff(change.positions.astype(np.int64)) > 0)
    return change


@pytest.mark.parametrize("name", CODECS)
def test_flipped_bits_and_cuts_are_refused_or_show_in_the_digest(name: str) -> None:
    (before, after), change, made = example(name)
    rng = np.random.default_rng(11)
    whole = np.concatenate([made.shared, made.parts[0]])
    refused = wrong = 0
    for turn in range(1500):
        damaged = whole.copy()
        if turn % 3:
            for at in rng.integers(0, whole.size, turn % 3 if turn % 4 else 20):
                damaged[at] ^= np.uint8(1 << int(rng.integers(8)))
            shared, part = damaged[: made.shared.size], damaged[made.shared.size :]
        else:
            shared, part = made.shared, made.parts[0][: rng.integers(0, made.parts[0].size)]
        found = attempt(name, shared, part, head(change), before)
        if found is None:
            refused += 1
            continue
        state = before.copy()
        moved = overwrite(state, found)
        assert add(element_sums(before), moved) == element_sums(state)
        if not np.array_equal(state, after.bits):
            wrong += 1
            assert element_sums(state) != element_sums(after.bits)
    assert refused > 400 and refused + wrong > 1200


@pytest.mark.parametrize("name", CODECS)
def test_bytes_for_another_tensor_are_refused_or_another_change(name: str) -> None:
    (before, _), change, made = example(name)
    for count in (change.count + 1, change.count - 1, -1, 2**62, 0):
        what = Head("w", "BF16", (3000,), count)
        assert attempt(name, made.shared, made.parts[0], what, before) is None, what
    for what, base in [
        (Head("w", "BF16", (2000,), change.count), before[:2000]),
        (Head("w", "BF16", (4000,), change.count), np.resize(before, 4000)),
        (Head("w", "F32", (3000,), change.count), before.astype(np.uint32)),
        (Head("w", "U8", (3000,), change.count), before.astype(np.uint8)),
    ]:
        attempt(name, made.shared, made.parts[0], what, base)


@pytest.mark.parametrize("name", CODECS)
def test_random_bytes_are_refused_or_a_change(name: str) -> None:
    (before, _), _, made = example(name)
    rng = np.random.default_rng(3)
    for turn in range(1500):
        noise = rng.integers(0, 256, int(rng.integers(0, 200)), np.uint8)
        shared = made.shared if turn % 2 else rng.integers(0, 256, int(rng.integers(0, 60)), np.uint8)
        attempt(name, shared, noise, Head("w", "BF16", (3000,), int(rng.integers(0, 40))), before)


def test_an_unknown_encoding_is_refused_by_name() -> None:
    with pytest.raises(WeightError, match=r"'zip' is not known here; known are indices, deltas"):
        codec("zip")


def test_the_bytes_of_a_release_are_pinned() -> None:
    """Stores outlive a release: these layouts must not move."""
    before = np.zeros(200_000, np.uint16)
    after = before.copy()
    after[[2, 3, 3 + 65_536, 199_999]] = [0x1234, 1, 2, 3]
    pair = before, HostTensor("w", "BF16", (200_000,), after)
    found = {name: encoded(name, [pair])[1].parts[0].tobytes() for name in ("indices", "deltas")}
    values = "3412 0100 0200 0300"
    assert found["indices"].hex() == ("02000000 03000000 03000100 3f0d0300" + values).replace(" ", "")
    assert found["deltas"].hex() == ("0200 0000 ffff 0000 ffff ffff 3d0d" + values).replace(" ", "")
    packed = encoded("deltas_zstd", [pair])[1].parts[0].tobytes()
    assert zstandard.ZstdDecompressor().decompress(packed) == found["deltas"]
    xor = encoded("xor", [pair])[1].parts[0].tobytes()
    assert zstandard.ZstdDecompressor().decompress(xor) == (before ^ after).tobytes()


@pytest.mark.skipif(library() is None, reason="the C files are not built here")
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_gaps_in_c_and_numpy_are_the_same(data: st.DataObject) -> None:
    steps = st.one_of(
        st.integers(1, 4), st.sampled_from([65_534, 65_535, 65_536, 65_537, 131_070, 131_071, 2**31])
    )
    places = np.cumsum(data.draw(st.lists(steps, max_size=30)), dtype=np.int64) - 1
    elements = int(places[-1]) + 1 + data.draw(st.integers(0, 70_000)) if places.size else 5
    positions = places.astype(changes.position_type(elements))
    gaps = deltas._gaps(positions)
    np.testing.assert_array_equal(gaps, deltas._reference_gaps(positions))
    for count, size in [(places.size, elements), (places.size + 1, elements), (places.size, elements - 1)]:
        for cut in (gaps, gaps[:-1], np.append(gaps, np.uint16(0xFFFF)), np.append(gaps, np.uint16(0))):
            raw = cut.view(np.uint8)
            found, want = deltas._positions(raw, count, size), deltas._reference_positions(cut, count, size)
            assert (found is None) == (want is None)
            if want is not None and found is not None:
                assert found.dtype == want.dtype
                np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("name", ["indices", "deltas", "deltas_zstd", "xor"])
def test_without_the_c_files_the_bytes_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, change, made = example(name)
    for module in (changes, deltas):
        monkeypatch.setattr(module, "library", lambda: None)
    _, again = encoded(name, [pair])
    assert again.parts[0].tobytes() == made.parts[0].tobytes()
    check_round_trip(name, [pair])
    wrong = Head("w", "BF16", (int(change.positions[-1]),), change.count)
    assert attempt(name, made.shared, made.parts[0], wrong, pair[0][: change.positions[-1]]) is None


def test_a_zstd_frame_makes_no_more_than_its_reader_allows() -> None:
    (before, _), change, _ = example("deltas_zstd")
    bomb = np.frombuffer(zstandard.ZstdCompressor().compress(bytes(1 << 24)), np.uint8)
    with pytest.raises(WeightError, match="16777216 bytes, where at most"):
        codec("deltas_zstd").decoder(np.zeros(0, np.uint8))(bomb, head(change), before)
    with pytest.raises(WeightError, match=r"longer than the tensor|other than"):
        codec("xor").decoder(np.zeros(0, np.uint8))(bomb, head(change), before)
