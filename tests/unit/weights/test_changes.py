"""Changes between two states of a tensor: C and NumPy find and write the same, the digest moves as recomputed, and
nothing is written outside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from turnout.core.errors import WeightError
from turnout.native.loader import library
from turnout.weights import changes, digest
from turnout.weights.changes import PIECE, PIECE_CHANGES, Change, collect, compare, overwrite, overwrite_all
from turnout.weights.digest import add, element_sums
from turnout.weights.tensors import ITEM_BYTES, UNSIGNED, HostTensor

NAME = {1: "U8", 2: "BF16", 4: "F32", 8: "F64"}


@pytest.fixture(params=["native", "numpy"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(changes, "library", lambda: None)
        monkeypatch.setattr(digest, "library", lambda: None)
    elif library() is None:
        pytest.skip("the C files are not built here")


def tensor(bits: Any, name: str = "w") -> HostTensor:
    return HostTensor(name, NAME[bits.itemsize], bits.shape, bits)


def two_states(width: int, count: int, density: float, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, count * width, np.uint8).view(UNSIGNED[width])
    now = base.copy()
    now[rng.random(count) < density] ^= now.dtype.type(1 << (8 * width - 1))
    return base, now


def check(base: Any, now: Any) -> Change:
    """Everything that is promised of one pair of states."""
    kept = base.copy()
    change, moved = compare([(base, tensor(now))])[0]
    np.testing.assert_array_equal(change.positions, np.flatnonzero(base != now))
    np.testing.assert_array_equal(change.bits, now[change.positions])
    assert change.positions.dtype == np.int32 and change.bits.dtype == now.dtype
    np.testing.assert_array_equal(base, kept)
    assert add(element_sums(base), moved) == element_sums(now)
    assert overwrite(kept, change) == moved
    np.testing.assert_array_equal(kept, now)
    return change


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("width", UNSIGNED)
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 2047, 2048, 2049, 300_001, PIECE + 77])
def test_what_changed_is_found_and_written(width: int, count: int) -> None:
    for density in (0.0, 0.01, 1.0):
        check(*two_states(width, count, density, seed=count))


@pytest.mark.usefixtures("path")
@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from((1, 2, 4, 8)))
def test_any_two_states(data: st.DataObject, width: int) -> None:
    base = data.draw(hnp.arrays(UNSIGNED[width], st.integers(0, 300)))
    now = base.copy()
    for at in data.draw(st.lists(st.integers(0, max(base.size - 1, 0)), max_size=20)) if base.size else []:
        now[at] = data.draw(st.integers(0, 2 ** (8 * width) - 1))
    check(base, now)


@pytest.mark.usefixtures("path")
def test_wgt_31_minus_zero_and_nan_payloads_are_changes_and_equal_bits_are_none() -> None:
    base = np.array([0, 0x7FC0, 0x7FC0, 0x0001, 0x3F80], np.uint16)
    now = np.array([0x8000, 0x7FC1, 0x7FC0, 0x0002, 0x3F80], np.uint16)
    assert check(base, now).positions.tolist() == [0, 1, 3]


@pytest.mark.usefixtures("path")
def test_many_tensors_at_once_are_as_one_by_one() -> None:
    pairs = []
    for at, (width, count) in enumerate(
        [(2, 2 * PIECE + 5), (8, 0), (1, 1), (4, 100), (2, 400_000), (1, 777)]
    ):
        base, now = two_states(width, count, 0.5, seed=at)
        pairs.append((base, tensor(now, str(at))))
    together = compare(pairs)
    states = [base.copy() for base, _ in pairs]
    moved = overwrite_all([(state, change) for state, (change, _) in zip(states, together)])
    assert sum(change.count for change, _ in together) > 8 * PIECE_CHANGES  # several pieces in one tensor
    for (base, now), (change, sums), state, again in zip(pairs, together, states, moved):
        alone = collect(base, now)
        np.testing.assert_array_equal(alone.positions, change.positions)
        np.testing.assert_array_equal(alone.bits, change.bits)
        np.testing.assert_array_equal(state, now.bits)
        assert add(element_sums(base), sums) == element_sums(now.bits) and sums == again


@pytest.mark.usefixtures("path")
def test_the_digest_moves_by_what_stood_there_not_by_the_base() -> None:
    base, now = two_states(2, 1000, 0.2, seed=1)
    change, moved = compare([(base, tensor(now))])[0]
    target = base.copy()
    target[int(change.positions[0])] ^= 5
    before = element_sums(target)
    assert add(before, overwrite(target, change)) == element_sums(target) == element_sums(now)
    assert add(before, moved) != element_sums(now)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("wrong", [[3, 10], [-1, 3], [0, 2**31 - 1]])
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_a_position_outside_is_refused_and_nothing_is_written(wrong: list[int], kind: type[Any]) -> None:
    good = Change("a", "U16", (10,), np.array([1], kind), np.array([7], np.uint16))
    bad = Change("b", "U16", (10,), np.array(wrong, kind), np.array([1, 2], np.uint16))
    target, other = np.zeros(10, np.uint16), np.zeros(10, np.uint16)
    with pytest.raises(WeightError, match="b: positions outside"):
        overwrite_all([(target, good), (other, bad)])
    assert not target.any() and not other.any()


@pytest.mark.usefixtures("path")
def test_what_does_not_fit_is_refused() -> None:
    change = Change("w", "U16", (10,), np.array([1], np.int32), np.array([7], np.uint16))
    fixed = np.zeros(10, np.uint16)
    fixed.flags.writeable = False
    narrow = Change("w", "U16", (10,), np.array([1], np.int16), np.array([7], np.uint16))
    for target in (np.zeros(11, np.uint16), np.zeros(10, np.int16), np.zeros(20, np.uint16)[::2], fixed):
        with pytest.raises(WeightError, match="cannot be written"):
            overwrite(target, change)
    with pytest.raises(WeightError, match="cannot be written"):
        overwrite(np.zeros(10, np.uint16), narrow)
    with pytest.raises(WeightError, match="the base has 9 elements"):
        collect(np.zeros(9, np.uint16), tensor(np.zeros(10, np.uint16)))


@pytest.mark.usefixtures("path")
def test_strided_states_are_compared_as_they_are() -> None:
    base, now = two_states(2, 2000, 0.3, seed=2)
    want = np.flatnonzero(base[::2] != now[::2])
    found = collect(base[::2], HostTensor("w", "BF16", (1000,), now[::2]))
    np.testing.assert_array_equal(found.positions, want)


def test_every_dtype_has_a_width_that_is_compared() -> None:
    assert set(ITEM_BYTES.values()) == set(UNSIGNED) == set(NAME)
