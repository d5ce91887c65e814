"""KV as bytes: what travels from one engine's cache to another's.

Promises: `gather` then `scatter` into any pages gives the same bits for every position of the prompt; positions
beyond it travel as zeros, so that equal KV gives equal bytes and no other request's KV leaves the engine.

The bytes: for each layer the keys, then the values, of each page in order, as engine.attention lays them out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from turnout.core.errors import InvariantBroken
from turnout.engine.attention import KvCache
from turnout.engine.settings import KERNEL_PAGE_TOKENS as PAGE


def layout(cache: KvCache) -> str:
    """Equal texts mean that bytes of one cache fit the other."""
    dtype = str(cache.dtype).removeprefix("torch.")
    return (
        f"{cache.layers} layers, {cache.kv_heads} kv heads of {cache.head_dim}, pages of {PAGE} tokens, "
        f"{dtype}, keys by dimension, values by token"
    )


def kv_bytes(cache: KvCache, pages: int) -> int:
    """Bytes of so many pages in all layers."""
    return sum(t[0].nbytes for t in (*cache.keys, *cache.values)) * pages


def gather(cache: KvCache, pages: Sequence[int], tokens: int, out: bytearray | memoryview) -> None:
    """Copies the pages of the first `tokens` positions of a sequence to `out`, which has their size."""
    index = torch.tensor(pages)
    used = tokens - (len(pages) - 1) * PAGE
    if not 0 < used <= PAGE:
        raise InvariantBroken(f"{tokens} positions in {len(pages)} pages")
    for layer, (keys, values) in enumerate(_parts(cache, len(pages), out)):
        torch.index_select(cache.keys[layer], 0, index, out=keys)
        torch.index_select(cache.values[layer], 0, index, out=values)
        keys[-1, :, :, used:] = 0
        values[-1, :, used:] = 0


def scatter(cache: KvCache, pages: Sequence[int], data: bytearray | memoryview) -> None:
    """Copies what `gather` made into these pages."""
    index = torch.tensor(pages)
    for layer, (keys, values) in enumerate(_parts(cache, len(pages), data)):
        cache.keys[layer].index_copy_(0, index, keys)
        cache.values[layer].index_copy_(0, index, values)


def digest(data: bytes | bytearray | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _parts(cache: KvCache, pages: int, data: bytearray | memoryview) -> Iterator[tuple[Tensor, Tensor]]:
    """The bytes as one pair of tensors per layer, without a copy."""
    if len(data) != kv_bytes(cache, pages):
        raise InvariantBroken(f"{len(data)} bytes are not the KV of {pages} pages")
    flat = torch.frombuffer(data, dtype=cache.dtype)
    at = 0
    for layer in range(cache.layers):
        pair = []
        for tensor in (cache.keys[layer], cache.values[layer]):
            shape = (pages, *tensor.shape[1:])
            end = at + pages * tensor[0].numel()
            pair.append(flat[at:end].view(shape))
            at = end
        yield pair[0], pair[1]
