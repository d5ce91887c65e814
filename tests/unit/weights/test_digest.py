"""Digests: the C path equals its reference, shards add up, changes move the sums, and every difference shows."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from turnout.native.loader import library, path_taken
from turnout.weights import digest
from turnout.weights.digest import (
    add,
    changed_sums,
    element_sums,
    finish,
    root_digest,
    root_of,
    row_sums,
    tensor_digest,
)
from turnout.weights.tensors import UNSIGNED, HostTensor

WIDTHS = (1, 2, 4, 8)
needs_native = pytest.mark.skipif(library() is None, reason=path_taken())


def noise(width: int, count: int, seed: int = 0) -> Any:
    raw = np.random.default_rng(seed).integers(0, 256, count * width, np.uint8)
    return raw.view(UNSIGNED[width])


def reference(bits: Any, first_position: int = 0) -> digest.Sums:
    """The definition, element by element in Python's own integers."""
    mask, sums = (1 << 64) - 1, [0, 0]

    def mix(x: int) -> int:
        x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD & mask
        x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 & mask
        return x ^ x >> 33

    if bits.dtype == np.uint64:
        bits, first_position = bits.view(np.uint32), 2 * first_position
    for at, value in enumerate(bits.tolist(), first_position):
        for which in (0, 1):
            key = mix(mask - (2 * (at // 1024) + which)) | 1
            sums[which] += key * (mix(1024 * which + at % 1024 + 1) >> 32) * value
    return sums[0] & mask, sums[1] & mask


def f32(*bits: int) -> HostTensor:
    return HostTensor("w", "F32", (len(bits),), np.array(bits, np.uint32))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("cuts", [(0, 7, 12), (0, 1, 5, 12)])
def test_blocks_of_columns_add_up_to_the_whole(width, native, cuts, monkeypatch):
    if not native:
        monkeypatch.setattr(digest, "library", lambda: None)
    whole = noise(width, 9 * 12, seed=width).reshape(9, 12)
    first, total = 2**32 - 40, (0, 0)
    for begin, end in itertools.pairwise(cuts):
        total = add(total, row_sums(whole[:, begin:end], end - begin, first + begin, 12))
    assert total == reference(whole.reshape(-1), first)
    assert total != row_sums(whole, 12, first + 1, 12) and total != row_sums(whole, 12, first, 13)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("first", [0, 1, 2**31 - 2, 2**32 - 3, 2**32, 2**40 + 5])
def test_the_sums_are_the_definition(width: int, first: int) -> None:
    bits = noise(width, 67)
    assert element_sums(bits, first) == reference(bits, first)


@needs_native
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("count", "first"), [(0, 0), (1, 7), (300_001, 0), (1_100_000, 2**32 - 500_000), (1000, 2**45)]
)
def test_c_and_numpy_agree_also_across_threads_blocks_and_2_to_the_32(
    width: int, count: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits = noise(width, count)
    native = element_sums(bits, first)
    monkeypatch.setattr(digest, "library", lambda: None)
    assert element_sums(bits, first) == native


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(WIDTHS), st.integers(0, 2**34))
def test_sums_over_shards_add_up(data: st.DataObject, width: int, first: int) -> None:
    bits = data.draw(hnp.arrays(UNSIGNED[width], st.integers(0, 40)))
    cut = data.draw(st.integers(0, bits.size))
    parts = add(element_sums(bits[cut:], first + cut), element_sums(bits[:cut], first))
    assert parts == element_sums(bits, first)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from((1, 2, 4)))
def test_changed_sums_equal_a_recomputation(data: st.DataObject, width: int) -> None:
    before = data.draw(hnp.arrays(UNSIGNED[width], st.integers(1, 40)))
    positions = np.array(sorted(data.draw(st.sets(st.integers(0, before.size - 1)))), np.int64)
    after = before.copy()
    after[positions] = data.draw(hnp.arrays(UNSIGNED[width], positions.size))
    moved = add(element_sums(before), changed_sums(positions, before[positions], after[positions]))
    assert moved == element_sums(after)


def test_changed_sums_hold_above_2_to_the_32() -> None:
    first = 2**32 - 2
    before, after = noise(2, 4, seed=1), noise(2, 4, seed=2)
    moved = add(element_sums(before, first), changed_sums(np.arange(first, first + 4), before, after))
    assert moved == element_sums(after, first)


MINUS_ZERO, NAN_A, NAN_B, INF, TINY = 0x80000000, 0x7FC00000, 0x7FC00001, 0x7F800000, 1


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (f32(0), f32(MINUS_ZERO)),
        (f32(NAN_A), f32(NAN_B)),
        (f32(0), f32(TINY)),
        (f32(INF), f32(INF | MINUS_ZERO)),
        (f32(1, 2), f32(2, 1)),
        (f32(0, 0, 5), f32(0, 5, 0)),
        (f32(1, 2, 3, 4), f32(3, 4, 1, 2)),
        (f32(0, 0), f32(0, 0, 0)),
    ],
    ids=["-0.0", "nan payload", "subnormal", "sign of inf", "swapped", "moved", "halves", "length"],
)
def test_every_difference_in_bits_and_places_shows(left: HostTensor, right: HostTensor) -> None:
    assert tensor_digest(left) != tensor_digest(right)


@pytest.mark.parametrize("width", WIDTHS)
def test_one_flipped_bit_anywhere_shows(width: int) -> None:
    bits = noise(width, 33)
    base, seen = element_sums(bits), set()
    for at in (0, 16, 32):
        for bit in range(8 * width):
            changed = bits.copy()
            changed[at] ^= np.array(1 << bit, bits.dtype)
            seen.add(element_sums(changed))
    assert base not in seen
    assert len(seen) == 3 * 8 * width


@pytest.mark.parametrize("width", WIDTHS)
def test_runs_and_elements_that_changed_places_show(width: int) -> None:
    """Also where they are alike in all but the place: shifts, swaps within a run of 1024 and of whole runs."""
    bits = noise(width, 4 * 1024, seed=9)
    bits[[0, 5, 7]] = bits[[1, 1023, 3079]] ^ bits.dtype.type(1)
    turned = [np.roll(bits, shift) for shift in (1, 2, 512, 1024, 2048)]
    for one, two in ((0, 1), (5, 1023), (7, 3079)):
        swapped = bits.copy()
        swapped[[one, two]] = bits[[two, one]]
        turned.append(swapped)
    runs = bits.reshape(4, 1024)
    turned += [runs[order].reshape(-1) for order in ([1, 0, 2, 3], [3, 1, 2, 0], [0, 2, 1, 3])]
    turned += [bits + bits.dtype.type(1), bits ^ np.array(1 << (8 * width - 1), bits.dtype)]
    lo, hi = zip(*(element_sums(each) for each in [bits, *turned]))
    assert len(set(lo)) == len(set(hi)) == len(turned) + 1


def test_dtype_and_shape_belong_to_the_digest() -> None:
    bits = np.zeros(6, np.uint16)
    found = {
        tensor_digest(HostTensor("w", dtype, shape, bits))
        for dtype in ("BF16", "F16", "I16", "U16")
        for shape in ((6,), (2, 3), (3, 2), (1, 6), (6, 1))
    }
    assert len(found) == 20
    empty = np.zeros(0, np.uint16)
    shapes = ((0,), (0, 4), (4, 0))
    assert len({tensor_digest(HostTensor("w", "BF16", shape, empty)) for shape in shapes}) == 3


def test_the_name_belongs_to_the_root_only() -> None:
    one, two = f32(1, 2), HostTensor("v", "F32", (2,), np.array([1, 2], np.uint32))
    assert tensor_digest(one) == tensor_digest(two)
    assert root_of([one]) != root_of([two])


def test_the_root_does_not_depend_on_the_order_and_needs_every_tensor() -> None:
    tensors = [
        HostTensor(name, "U8", (3,), noise(1, 3, seed=at)) for at, name in enumerate(["b", "a/é", "a"])
    ]
    assert root_of(tensors) == root_of(reversed(tensors))
    assert root_of(tensors) != root_of(tensors[1:])
    assert len(root_of([])) == len(root_of(tensors)) == 32


def test_digests_swapped_between_two_names_change_the_root() -> None:
    rows = {"a": ("U8", (1,), "1" * 32), "b": ("U8", (1,), "2" * 32)}
    swapped = {"a": rows["b"], "b": rows["a"]}
    assert root_digest(rows) != root_digest(swapped)


def test_digests_of_a_release_are_pinned() -> None:
    """Stores outlive a release: the definition must not move."""
    bits = np.arange(5, dtype=np.uint16)
    assert element_sums(bits, 2**32 - 2) == (7350678253624730362, 263432969148161457)
    assert finish((1, 2), "BF16", (5,)) == "e75ea775becc52c615fc1df179c8be8a"


_CHILD = """
import numpy as np
from turnout.native.loader import library
from turnout.weights.digest import element_sums
print(library() is None)
for width in (1, 2, 4, 8):
    raw = np.random.default_rng(width).integers(0, 256, 1000 * width, np.uint8)
    print(element_sums(raw.view(f"u{width}"), 2**32 - 500))
"""


def test_without_the_c_files_the_digests_are_the_same() -> None:
    environment = os.environ | {"TURNOUT_NATIVE": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _CHILD],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    first, *lines = done.stdout.splitlines()
    assert first == "True"
    expected = [str(element_sums(noise(width, 1000, seed=width), 2**32 - 500)) for width in WIDTHS]
    assert lines == expected
