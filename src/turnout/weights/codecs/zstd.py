"""zstd frames of byte arrays, on several threads, and guarded: a damaged frame is a WeightError, and none makes
more bytes than its reader allows. Level 1: a delta is compressed in the time of a train step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import zstandard

from turnout.core.errors import WeightError
from turnout.weights.codecs.codec import Bytes

LEVEL = 1
Item = TypeVar("Item")
Made = TypeVar("Made")


def over(function: Callable[[Item], Made], items: Sequence[Item]) -> list[Made]:
    """function(item) for each, in order, on as many threads as there are CPUs: for work that frees the GIL."""
    threads = min(len(os.sched_getaffinity(0)), len(items))
    if threads < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, items))


def compress(data: Bytes) -> Bytes:
    """One frame, which tells its content's size."""
    return np.frombuffer(zstandard.ZstdCompressor(level=LEVEL).compress(data.data), np.uint8)


def decompress(frame: Bytes, limit: int, name: str) -> Bytes:
    """The content of a frame and nothing after it; raises WeightError, with `name` in it, for any other bytes or
    a content of more than `limit` bytes."""
    try:
        size = zstandard.get_frame_parameters(frame.data).content_size
        if not 0 <= size <= limit:  # also where the frame does not tell it
            raise WeightError(f"{name}: a zstd frame of {size} bytes, where at most {limit} can be")
        data = zstandard.ZstdDecompressor().decompress(frame.data, allow_extra_data=False)
    except zstandard.ZstdError as fault:
        raise WeightError(f"{name}: broken zstd frame: {fault}") from fault
    return np.frombuffer(data, np.uint8)
