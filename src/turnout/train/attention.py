"""Attention over a packed row: blocks from the packing plan, no mask over the whole row.

Registered with transformers as "turnout_packed"; the model's forward is given `packed=PackedLayout(...)`.
Blocks of equal shape are one batch of matrix products. Scores are recomputed in backward, so nothing of
size queries x keys outlives a layer. Heads that share keys are folded into the query axis, so that keys and
values are never repeated.

Why not the fused CPU kernel of PyTorch: its bf16 backward takes 150 ms for 64 sequences of 65 tokens with 9
heads, batched products take a tenth of that; it also knows no shared prefix.

Legend: T rows, Hq and Hk query and key heads, R = Hq / Hk, D head size, N blocks of a batch, m own rows,
s = prefix rows + m keys.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from turnout.core.errors import InvariantBroken
from turnout.train.native_ops import call, usable
from turnout.train.packing import Block

NAME = "turnout_packed"
MAX_PAIRS = 1 << 20  # (query, key) pairs of one batch: bounds the scores that exist at once


class BlockBatch:
    """Blocks of one shape: row numbers of queries [N * m] and keys [N * s], and the mask of the own part."""

    def __init__(self, blocks: list[Block], device: torch.device) -> None:
        self.count = len(blocks)
        self.own = blocks[0].own.length
        self.prefix = blocks[0].shape[0]
        self.keys = self.prefix + self.own
        self.spans = [block.prefix for block in blocks]
        queries = np.concatenate([_range(b.own.first, b.own.length) for b in blocks])
        keys = np.concatenate([_range(s.first, s.length) for b in blocks for s in (*b.prefix, b.own)])
        self.query_rows = torch.from_numpy(queries).to(device)
        self.key_rows = torch.from_numpy(keys).to(device)
        starts = np.cumsum([0, *blocks[0].segments[:-1]])
        first = np.repeat(starts, blocks[0].segments).astype(np.int64)
        self.first = torch.from_numpy(first).to(
            device
        )  # own key that a query sees first: that of its segment

    @functools.cached_property
    def hidden(self) -> Tensor:
        """[m, m]: which own keys a query does not see; the C softmax needs no such matrix."""
        key = torch.arange(self.own, device=self.first.device)
        return (key < self.first[:, None]) | (key > key[:, None])


class PackedLayout:
    """What attention needs to know of a micro-batch; made once, used by every layer."""

    def __init__(self, blocks: tuple[Block, ...], device: torch.device) -> None:
        shapes: dict[object, list[Block]] = {}
        for block in blocks:
            shapes.setdefault(block.shape, []).append(block)
        self.batches: list[BlockBatch] = []
        for alike in shapes.values():
            prefix, segments = alike[0].shape
            step = max(1, MAX_PAIRS // (sum(segments) * (prefix + sum(segments))))
            self.batches += [BlockBatch(alike[i : i + step], device) for i in range(0, len(alike), step)]
        order = torch.cat([batch.query_rows for batch in self.batches])
        # Results come out in the order of the batches; this brings them back to the order of rows.
        self.inverse = torch.empty_like(order)
        self.inverse[order] = torch.arange(len(order), device=device)


def _range(first: int, length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.arange(first, first + length, dtype=np.int64)


def _queries(q_THD: Tensor, batch: BlockBatch, key_heads: int) -> Tensor:
    """[N * Hk, R * m, D]"""
    _, heads, size = q_THD.shape
    picked = q_THD.index_select(0, batch.query_rows)
    folded = picked.view(batch.count, batch.own, key_heads, heads // key_heads, size).permute(0, 2, 3, 1, 4)
    return folded.reshape(batch.count * key_heads, -1, size)


def _keys(k_THD: Tensor, batch: BlockBatch) -> Tensor:
    """[N * Hk, s, D]"""
    _, heads, size = k_THD.shape
    picked = k_THD.index_select(0, batch.key_rows).view(batch.count, batch.keys, heads, size)
    return picked.transpose(1, 2).reshape(batch.count * heads, batch.keys, size)


def _unfold(x: Tensor, batch: BlockBatch, key_heads: int) -> Tensor:
    """[N * Hk, R * m, D] back to rows [N * m, Hq, D]."""
    size = x.shape[-1]
    parts = x.view(batch.count, key_heads, -1, batch.own, size).permute(0, 3, 1, 2, 4)
    return parts.reshape(batch.count * batch.own, -1, size)


def _weights(q: Tensor, k: Tensor, batch: BlockBatch, scale: float) -> Tensor:
    """Attention weights [N * Hk, R * m, s]: products in the compute dtype, softmax in fp32 inside."""
    scores = torch.bmm(q, k.transpose(1, 2))
    if usable(scores):
        rows = scores.shape[0] * scores.shape[1]
        call("turnout_masked_softmax", scores, batch.first, rows, batch.own, batch.prefix, scale)
        return scores
    scores.mul_(scale)
    own = scores.view(scores.shape[0], -1, batch.own, batch.keys)[..., batch.prefix :]
    own.masked_fill_(batch.hidden, float("-inf"))
    return torch.softmax(scores, -1)


def _score_gradient(d_weights: Tensor, weights: Tensor, scale: float) -> Tensor:
    if not usable(weights):
        return torch._softmax_backward_data(d_weights, weights, -1, weights.dtype).mul_(scale)
    *lead, keys = weights.shape
    call("turnout_masked_softmax_backward", weights, d_weights, math.prod(lead), keys, scale)
    return d_weights


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: tuple[PackedLayout, float]) -> Tensor:
        """q [T, Hq, D], k and v [T, Hk, D] -> [T, Hq, D]"""
        (layout, scale), heads = how, k.shape[1]
        outs: list[Tensor] = []
        for batch in layout.batches:
            keys = _keys(k, batch)
            weights = _weights(_queries(q, batch, heads), keys, batch, scale)
            outs.append(_unfold(torch.bmm(weights, _keys(v, batch)), batch, heads))
        ctx.save_for_backward(q, k, v)
        ctx.layout, ctx.scale = layout, scale
        return torch.cat(outs).index_select(0, layout.inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v = ctx.saved_tensors
        layout: PackedLayout = ctx.layout
        heads = k.shape[1]
        dq: list[Tensor] = []
        dk: list[Tensor] = []
        dv: list[Tensor] = []
        for batch in layout.batches:
            queries, keys, values = _queries(q, batch, heads), _keys(k, batch), _keys(v, batch)
            weights = _weights(queries, keys, batch, ctx.scale)
            d_out = _queries(grads[0], batch, heads)
            d_weights = torch.bmm(d_out, values.transpose(1, 2))
            d_scores = _score_gradient(d_weights, weights, ctx.scale)
            dq.append(_unfold(torch.bmm(d_scores, keys), batch, heads))
            dk.append(torch.bmm(d_scores.transpose(1, 2), queries))
            dv.append(torch.bmm(weights.transpose(1, 2), d_out))
        return (
            torch.cat(dq).index_select(0, layout.inverse),
            _to_rows(dk, layout, heads),
            _to_rows(dv, layout, heads),
            None,
        )


def _to_rows(grads: list[Tensor], layout: PackedLayout, heads: int) -> Tensor:
    """Per batch [N * Hk, s, D] -> [T, Hk, D]: a row's own block once, plus every block it is a prefix of."""
    dtype, size = grads[0].dtype, grads[0].shape[-1]
    split = [g.view(b.count, heads, b.keys, size) for g, b in zip(grads, layout.batches)]
    own = [
        g[:, :, b.prefix :].transpose(1, 2).reshape(-1, heads, size) for g, b in zip(split, layout.batches)
    ]
    rows = torch.cat(own).index_select(0, layout.inverse)
    if not any(batch.prefix for batch in layout.batches):
        return rows
    total = rows.float()
    for grad, batch in zip(split, layout.batches):
        for index, spans in enumerate(batch.spans):
            start = 0
            for span in spans:
                part = grad[index, :, start : start + span.length].transpose(0, 1)
                total[span.first : span.first + span.length].add_(part)
                start += span.length
    return total.to(dtype)


def packed_attention(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, layout: PackedLayout, scale: float
) -> Tensor:
    """Attention over a packed row: q [T, Hq, D], k and v [T, Hk, D] -> [T, Hq, D], in q's dtype."""
    return _PackedAttention.apply(q_THD, k_THD, v_THD, (layout, scale))  # pyright: ignore[reportReturnType]


def _interface(
    _module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query [1, Hq, T, D], key and value [1, Hk, T, D] -> [1, T, Hq, D]."""
    layout = kwargs.get("packed")
    if layout is None or attention_mask is not None or query.shape[0] != 1:
        raise InvariantBroken("packed attention needs one row, a layout and no mask")
    scale = kwargs["scaling"]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return packed_attention(q, k, v, layout, scale)[None], None


AttentionInterface.register(NAME, _interface)
