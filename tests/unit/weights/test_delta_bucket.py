"""Buckets of changes: what is unpacked is what was packed, whatever the boundaries; what cannot be is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnout.core.errors import WeightError
from turnout.weights import delta_bucket
from turnout.weights.changes import Change, position_type
from turnout.weights.tensors import ITEM_BYTES, UNSIGNED


@st.composite
def changes(draw):
    made = []
    for at in range(draw(st.integers(0, 5))):
        dtype = draw(st.sampled_from(["BF16", "F32", "I8", "BOOL", "F64"]))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        elements = math.prod(shape)
        flags = np.array(draw(st.lists(st.booleans(), min_size=elements, max_size=elements)), bool)
        positions = np.flatnonzero(flags).astype(position_type(elements))
        kind = UNSIGNED[ITEM_BYTES[dtype]]
        top = np.iinfo(kind).max
        bits = np.array(
            draw(st.lists(st.integers(0, top), min_size=positions.size, max_size=positions.size)), kind
        )
        made.append(Change(f"t{at}", dtype, shape, positions, bits))
    return made


def told(change):
    return [
        (change.name, change.dtype, change.shape, int(p), int(b))
        for p, b in zip(change.positions, change.bits)
    ]


@settings(max_examples=60, deadline=None)
@given(changes(), st.integers(1, 400))
def test_any_boundary_gives_the_same_changes(made, limit):
    found, last = [], None
    for bucket in delta_bucket.cut(made, limit):
        assert bucket and all(change.count for change in bucket)
        data = np.full(delta_bucket.nbytes(bucket), 0xAA, np.uint8)
        placed = delta_bucket.pack(bucket, data)
        assert data.size <= limit or len(bucket) == 1 == bucket[0].count
        assert all(part.start % 8 == part.bits % 8 == part.end % 8 == 0 for part in placed)
        described = [(p.name, p.dtype, list(p.shape), p.count) for p in placed]
        assert delta_bucket.parts(described) == placed
        for change in delta_bucket.unpack(data, placed):
            if last is not None and last.name == change.name:
                assert last.positions[-1] < change.positions[0]
            last = change
            found += told(change)
    assert found == [line for change in made for line in told(change)]


def test_positions_are_64_bits_wide_from_2_to_the_31_elements_on():
    change = Change(
        "huge", "BF16", (1 << 31,), np.array([5, (1 << 31) - 1], np.int64), np.array([1, 2], np.uint16)
    )
    data = np.empty(delta_bucket.nbytes([change]), np.uint8)
    (back,) = delta_bucket.unpack(data, delta_bucket.pack([change], data))
    assert told(back) == told(change) and data.size == 16 + 8


@pytest.mark.parametrize("positions", [[3, 3], [4, 2], [-1, 2], [0, 6]])
def test_positions_that_cannot_be_are_refused_by_name(positions):
    change = Change("w", "BF16", (2, 3), np.array(positions, np.int32), np.array([1, 2], np.uint16))
    data = np.empty(delta_bucket.nbytes([change]), np.uint8)
    placed = delta_bucket.pack([change], data)
    with pytest.raises(WeightError, match="w: positions outside the tensor"):
        list(delta_bucket.unpack(data, placed))
    with pytest.raises(WeightError, match="w: bytes 0 to 16 of a bucket of 8"):
        list(delta_bucket.unpack(data[:8], placed))


@pytest.mark.parametrize(("shape", "count"), [([2, 3], 7), ([2, 3], -1), ([-2, -3], 1)])
def test_sizes_that_cannot_be_are_refused(shape, count):
    with pytest.raises(WeightError, match="changes in a tensor of shape"):
        delta_bucket.parts([("w", "BF16", shape, count)])
