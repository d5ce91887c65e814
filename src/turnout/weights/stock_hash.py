"""The two hashes in which SGLang 0.5.23's weights checker reports a tensor, over its bytes.

On a CPU: the first 8 bytes of SHA-256. On a GPU: for each 32-bit word two mixes of the word with its position,
added up over tiles of 8192 words; each tile's two sums are mixed with the byte count of the whole tensor and make
64 bits; these are added and mixed once more. All arithmetic is modulo 2^32 within a tile and 2^64 between tiles.
Promises: bytes may come in pieces of any size; memory is one tile and 8 bytes for every tile before it.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

TILE_BYTES = 4 * 8192
BATCH_TILES = 16
_SEED = 0x243F6A88
_SEEDS = (np.uint32(_SEED), np.uint32(((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF))
_POSITION = ((np.uint32(0x27D4EB2D), 15), (np.uint32(0x165667B1), 13))
_MIX = (np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35))
_WORD64 = (1 << 64) - 1

Words = NDArray[np.uint32]


class TensorHash(Protocol):
    """One tensor's hash: `update` in the order of its bytes, then 16 hex digits."""

    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


class CpuHash:
    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def update(self, data: bytes, /) -> None:
        self._sha.update(data)

    def hexdigest(self) -> str:
        return self._sha.hexdigest()[:16]


class GpuHash:
    def __init__(self) -> None:
        self._bytes = 0
        self._rest = b""
        self._sums: list[Words] = []  # [tiles, 2] each

    def update(self, data: bytes, /) -> None:
        self._bytes += len(data)
        data = self._rest + data
        whole = len(data) // TILE_BYTES * TILE_BYTES
        for start in range(0, whole, BATCH_TILES * TILE_BYTES):
            end = min(start + BATCH_TILES * TILE_BYTES, whole)
            self._add(np.frombuffer(data, np.uint32, (end - start) // 4, start))
        self._rest = data[whole:]

    def hexdigest(self) -> str:
        sums = list(self._sums)
        if self._rest:
            padded = self._rest + bytes(-len(self._rest) % 4)
            sums.append(_tile_sums(np.frombuffer(padded, np.uint32), self._tiles))
        if not sums:
            return f"{0:016x}"
        total = np.uint32((self._bytes + -self._bytes % 4) & 0xFFFFFFFF)
        mixed = _mix(np.concatenate(sums) ^ total).astype(np.uint64)
        tiles = (mixed[:, 0] << np.uint64(32)) | mixed[:, 1]
        return f"{_mix64(int(np.add.reduce(tiles, dtype=np.uint64))):016x}"

    @property
    def _tiles(self) -> int:
        return sum(len(part) for part in self._sums)

    def _add(self, words: Words) -> None:
        self._sums.append(_tile_sums(words, self._tiles))


def _tile_sums(words: Words, first_tile: int) -> Words:
    """Both sums of each tile, [tiles, 2]; the last tile may be shorter."""
    words_per_tile = TILE_BYTES // 4
    first = first_tile * words_per_tile
    at = np.arange(first, first + len(words), dtype=np.uint64).astype(np.uint32)
    starts = np.arange(0, len(words), words_per_tile)
    columns: list[Words] = []
    for seed, (factor, turn) in zip(_SEEDS, _POSITION):
        turned = (at << np.uint32(turn)) | (at >> np.uint32(32 - turn))
        mixed = _mix(words ^ ((at * factor + seed) ^ turned))
        columns.append(np.add.reduceat(mixed, starts, dtype=np.uint32))
    return np.stack(columns, axis=1)


def _mix(words: Words) -> Words:
    mixed = words ^ (words >> np.uint32(16))
    mixed *= _MIX[0]
    mixed ^= mixed >> np.uint32(13)
    mixed *= _MIX[1]
    mixed ^= mixed >> np.uint32(16)
    return mixed


def _mix64(word: int) -> int:
    word ^= word >> 30
    word = word * 0xBF58476D1CE4E5B9 & _WORD64
    word ^= word >> 27
    word = word * 0x94D049BB133111EB & _WORD64
    return word ^ word >> 31


HASHES: dict[str, type[CpuHash] | type[GpuHash]] = {"cpu": CpuHash, "cuda": GpuHash}
