"""The hashes of a stock SGLang. The GPU's values come from SGLang 0.5.23's kernel, run by Triton's interpreter."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from turnout.weights.stock_hash import CpuHash, GpuHash

KERNEL = [
    (4, "b2dd353a7c0ed360"),
    (6, "60553c76ce98da6a"),
    (1000, "26c2ba7bc70be9dc"),
    (32768, "dbbe0ffe3ef7bcb0"),
    (40000, "71e252d7082b0b3d"),
    (1310722, "1ddf24ae68262121"),
]


def pattern(count: int) -> bytes:
    return (np.arange(count, dtype=np.uint64) * 2654435761 >> 7).astype(np.uint8).tobytes()


@pytest.mark.parametrize(("count", "expected"), KERNEL)
@pytest.mark.parametrize("pieces", [(), (1,), (3, 32767), (2, 4, 70000)])
def test_the_gpu_hash_is_the_kernels_for_any_pieces(count, expected, pieces):
    data, made = pattern(count), GpuHash()
    start = 0
    for end in [*(p for p in pieces if p < count), count]:
        made.update(data[start:end])
        start = end
    assert made.hexdigest() == expected


def test_nothing_hashes_to_zero_on_a_gpu():
    assert GpuHash().hexdigest() == "0" * 16


def test_the_cpu_hash_is_the_start_of_sha256():
    made = CpuHash()
    made.update(b"ab")
    made.update(b"c")
    assert made.hexdigest() == hashlib.sha256(b"abc").hexdigest()[:16]
