"""Host tensors: bits, not values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from turnout.weights.tensors import ITEM_BYTES, UNSIGNED, HostTensor, narrowed, nonfinite_count


def host(dtype: str, *bits: int, shape: tuple[int, ...] | None = None) -> HostTensor:
    array = np.array(bits, UNSIGNED[ITEM_BYTES[dtype]])
    return HostTensor("w", dtype, shape if shape is not None else (len(bits),), array)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_bits_must_have_the_width_and_count_of_the_dtype_and_shape(dtype: str) -> None:
    width = UNSIGNED[ITEM_BYTES[dtype]]
    assert HostTensor("w", dtype, (2, 3), np.zeros(6, width)).nbytes == 6 * ITEM_BYTES[dtype]
    assert HostTensor("w", dtype, (), np.zeros(1, width)).nbytes == ITEM_BYTES[dtype]
    assert HostTensor("w", dtype, (0, 4), np.zeros(0, width)).nbytes == 0
    other = UNSIGNED[8 if ITEM_BYTES[dtype] == 1 else 1]
    wrong: list[Any] = [np.zeros(5, width), np.zeros((2, 3), width), np.zeros(6, other)]
    for bits in wrong:
        with pytest.raises(ValueError, match="w: "):
            HostTensor("w", dtype, (2, 3), bits)


@pytest.mark.parametrize(
    ("dtype", "finite", "nonfinite"),
    [
        ("BF16", (0, 0x8000, 0x7F7F, 1, 0x3F80), (0x7F80, 0xFF80, 0x7FC1, 0xFFFF)),
        ("F16", (0, 0x8000, 0x7BFF, 1), (0x7C00, 0xFC00, 0x7E01)),
        ("F32", (0, 0x80000000, 0x7F7FFFFF, 1), (0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001)),
        ("F64", (0, 1 << 63, 0x7FEFFFFFFFFFFFFF, 1), (0x7FF0000000000000, 0xFFF0000000000000, (1 << 64) - 1)),
        ("F8_E4M3", (0, 0x80, 0x7E, 0xFE, 0x78), (0x7F, 0xFF)),
        ("F8_E5M2", (0, 0x80, 0x7B, 1), (0x7C, 0xFC, 0x7F)),
    ],
)
def test_nonfinite_count_by_dtype(dtype: str, finite: tuple[int, ...], nonfinite: tuple[int, ...]) -> None:
    assert nonfinite_count(host(dtype, *finite)) == 0
    assert nonfinite_count(host(dtype, *finite, *nonfinite)) == len(nonfinite)
    assert nonfinite_count(host(dtype, shape=(0, 4))) == 0


@pytest.mark.parametrize("dtype", ["BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64"])
def test_integers_are_always_finite(dtype: str) -> None:
    assert nonfinite_count(host(dtype, (1 << 8 * ITEM_BYTES[dtype]) - 1)) == 0


@given(hnp.arrays(np.uint32, st.integers(0, 20)))
def test_nonfinite_count_is_what_numpy_says(bits: np.ndarray) -> None:
    found = nonfinite_count(HostTensor("w", "F32", (bits.size,), bits))
    assert found == np.count_nonzero(~np.isfinite(bits.view(np.float32)))


def test_narrowed_loses_nothing() -> None:
    exact = host("F32", 0x3F800000, 0x80000000, 0x7FC10000, 0x00010000)
    got = narrowed(exact, "BF16")
    assert (got.name, got.dtype, got.shape) == ("w", "BF16", (4,))
    assert got.bits.tolist() == [0x3F80, 0x8000, 0x7FC1, 1]


def test_narrowed_leaves_what_it_would_change_and_what_is_not_asked() -> None:
    inexact = host("F32", 0x3F800000, 0x3F800001)
    assert narrowed(inexact, "BF16") is inexact
    exact, half = host("F32", 0x3F800000), host("F16", 0x3C00)
    assert narrowed(exact, "F32") is exact
    assert narrowed(exact, "F16") is exact
    assert narrowed(half, "BF16") is half


def test_narrowed_keeps_a_nan_whose_payload_is_in_the_low_half() -> None:
    low = host("F32", 0x7F800001)
    assert narrowed(low, "BF16") is low, "it would become an infinity"
