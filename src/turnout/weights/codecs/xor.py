"""`xor`: the new patterns xor the old ones over the whole tensor, then zstd. For interchange: any tool reads it.

A part is zstd data whose content is the xor of all elements [elements], little-endian. Written and read in blocks,
so that memory does not grow with the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import zstandard

from turnout.core.errors import WeightError
from turnout.weights.changes import Bits, Change, collect, position_type
from turnout.weights.codecs.codec import Bytes, Decode, Encoded, Head
from turnout.weights.codecs.zstd import LEVEL, over
from turnout.weights.tensors import ITEM_BYTES, UNSIGNED, HostTensor

BLOCK = 1 << 20  # elements


class Xor:
    """See the module."""

    needs_base = True

    def encode(self, items: Sequence[tuple[Change, Bits]]) -> Encoded:
        return Encoded(np.zeros(0, np.uint8), over(_encode, items))

    def decoder(self, shared: Bytes) -> Decode:
        if shared.size:
            raise WeightError(f"xor: {shared.size} bytes of tables, where there are none")
        return _decode


def _encode(item: tuple[Change, Bits]) -> Bytes:
    change, base = item
    frame = zstandard.ZstdCompressor(level=LEVEL).compressobj(size=base.nbytes)
    block, made = np.zeros(min(BLOCK, base.size), base.dtype), []
    cuts = np.searchsorted(change.positions, np.arange(0, base.size + BLOCK, BLOCK))
    for start, first, last in zip(range(0, base.size, BLOCK), cuts, cuts[1:]):
        positions = change.positions[first:last]
        block[positions - start] = base[positions] ^ change.bits[first:last]
        made.append(frame.compress(block[: base.size - start].data))
        block[positions - start] = 0
    return np.frombuffer(b"".join([*made, frame.flush()]), np.uint8)


def _decode(part: Bytes, head: Head, base: Bits | None) -> Change:
    elements, width = math.prod(head.shape), ITEM_BYTES[head.dtype]
    if base is None or base.shape != (elements,) or base.dtype != UNSIGNED[width]:
        raise WeightError(f"{head.name}: xor needs the base's bits")
    kind = position_type(elements)
    places, patterns = [np.zeros(0, kind)], [np.zeros(0, base.dtype)]
    start, count, none = 0, 0, np.zeros(min(BLOCK, elements), base.dtype)
    for block in _blocks(part, head.name, base):
        found = collect(none[: block.size], HostTensor(head.name, head.dtype, block.shape, block))
        positions = found.positions.astype(kind) + kind(start)
        places.append(positions)
        patterns.append(base[positions] ^ found.bits)
        start, count = start + block.size, count + found.count
        if count > head.count:
            break
    if count != head.count:
        raise WeightError(f"{head.name}: other than {head.count} elements are changed")
    return Change(head.name, head.dtype, head.shape, np.concatenate(places), np.concatenate(patterns))


def _blocks(part: Bytes, name: str, base: Bits) -> Iterator[Bits]:
    """The xor of a whole tensor like `base`, in blocks; raises WeightError for other content than that."""
    with zstandard.ZstdDecompressor().stream_reader(part.data, read_across_frames=True) as reader:
        try:
            for start in range(0, base.size, BLOCK):
                block = np.empty(min(BLOCK, base.size - start), base.dtype)
                if _fill(reader, block.view(np.uint8)) != block.nbytes:
                    raise WeightError(f"{name}: the xor ends before the tensor does")
                yield block
            if reader.read(1):
                raise WeightError(f"{name}: the xor is longer than the tensor")
        except zstandard.ZstdError as fault:
            raise WeightError(f"{name}: broken zstd data: {fault}") from fault


def _fill(reader: zstandard.ZstdDecompressionReader, block: Bytes) -> int:
    """Reads until the block is full or the data ends; returns the bytes read."""
    done = 0
    while done < block.size and (got := reader.readinto(block[done:].data)):
        done += got
    return done
