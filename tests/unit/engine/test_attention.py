"""Paged attention: right against float64, and bit-equal however the rows are batched or chunked."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from turnout.engine import attention
from turnout.engine.attention import KvCache, StepRows
from turnout.native.loader import library

SHAPES = [(9, 3, 64), (4, 4, 16), (4, 2, 16), (8, 1, 24), (32, 2, 128), (5, 1, 8), (12, 1, 40)]
DTYPES = [torch.float32, torch.bfloat16]
PATHS = ["native", "torch"]


class Sequences:
    """Sequences of given lengths with random q, k, v, each with pages of its own in shuffled order."""

    def __init__(self, lengths, shape, dtype):
        self.heads, self.kv_heads, self.dim = shape
        gen = torch.Generator().manual_seed(5)
        counts = [-(-n // 16) for n in lengths]
        order = torch.randperm(sum(counts) + 3, generator=gen).tolist()
        self.table = torch.zeros((len(lengths), max(counts)), dtype=torch.int32)
        for line, count in enumerate(counts):
            self.table[line, :count] = torch.tensor([order.pop() for _ in range(count)])
        self.cache = KvCache(sum(counts) + 3, self.kv_heads, self.dim, 1, dtype)
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor.fill_(float("nan"))  # what nobody wrote must not be read
        rand = lambda n, heads: torch.randn((n, heads, self.dim), generator=gen).to(dtype)  # noqa: E731
        self.q = [rand(n, self.heads) for n in lengths]
        self.k = [rand(n, self.kv_heads) for n in lengths]
        self.v = [rand(n, self.kv_heads) for n in lengths]

    def step(self, path, chunks, padding=3):
        """Runs (sequence, first, count) chunks and `padding` dead rows; returns a list of outputs."""
        cut = lambda x: torch.cat([x[s][a : a + n] for s, a, n in chunks] + [x[0][:1]] * padding)  # noqa: E731
        qkv = tuple(cut(x).transpose(0, 1) for x in (self.q, self.k, self.v))
        sequence = torch.tensor(
            [s for s, _, n in chunks for _ in range(n)] + [-1] * padding, dtype=torch.int32
        )
        where = [p for _, a, n in chunks for p in range(a, a + n)] + [0] * padding
        rows = StepRows(sequence, torch.tensor(where, dtype=torch.int32), self.table, self.cache)
        call = attention._native if path == "native" else attention._reference
        out = call(rows, 0, qkv, self.dim**-0.5)
        assert not out[len(out) - padding :].any()
        return list(out[: len(out) - padding].split([n for _, _, n in chunks]))

    def dense(self, s):
        """Plain causal attention in float64, [tokens, heads, dim]."""
        q, k, v = (x[s].double() for x in (self.q, self.k, self.v))
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.dim)
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


@pytest.fixture(params=PATHS)
def path(request):
    if request.param == "native" and library() is None:
        pytest.skip("no C compiler")
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_dense_attention(path, shape, dtype):
    sequences = Sequences([37, 1, 16, 50], shape, dtype)
    out = sequences.step(path, [(s, 0, len(sequences.q[s])) for s in range(4)])
    tolerance = 2e-6 if dtype == torch.float32 else 1.2e-2
    for s in range(4):
        torch.testing.assert_close(out[s].double(), sequences.dense(s), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_depend_on_neither_batch_nor_chunk(path, shape, dtype):
    lengths = [37, 21, 16, 50]
    whole = Sequences(lengths, shape, dtype)
    at_once = whole.step(path, [(s, 0, n) for s, n in enumerate(lengths)])
    alone = Sequences(lengths, shape, dtype)
    for cuts in ([0, 37], [0, 5, 16, 17, 33, 37], list(range(38))):
        parts = [alone.step(path, [(0, a, b - a)], padding=0)[0] for a, b in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), at_once[0]), cuts
    mixed = Sequences(lengths, shape, dtype)
    mixed.step(path, [(1, 0, 20), (3, 0, 48)])
    last = mixed.step(path, [(3, 48, 2), (2, 0, 16), (1, 20, 1)])
    assert torch.equal(last[0], at_once[3][48:])
    assert torch.equal(last[1], at_once[2])
    assert torch.equal(last[2], at_once[1][20:])


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_change_bits(dtype):
    before = torch.get_num_threads()
    try:
        outs = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outs.append(Sequences([70, 33], (9, 3, 64), dtype).step("native", [(0, 0, 70), (1, 0, 33)]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for out in outs[1:] for a, b in zip(out, outs[0]))
