"""The numbers of a model that the engine works with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """What the engine needs to know of a model; all counts."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    eos_ids: frozenset[int]
