"""Sampling for a whole batch: tokens and their log-probs.

Promises, per row and bit for bit whatever the batch:
- noise is a hash of (seed, absolute token position) -> uniform in [0, 1) with 53 bits, through the inverse
  distribution function over token ids; temperature 0 takes the largest logit, the lowest id among equals;
- the log-prob is log-softmax(logits / temperature) over the whole vocabulary (temperature 0: of the raw
  logits), untouched by top-k, top-p, min-p and min_new_tokens, which only decide what can be drawn;
- filters as in SGLang 0.5.23: banned ids go first, then top-k, top-p and min-p, each on the probabilities
  of what was not banned; a token is outside the nucleus when those more probable (lower id first among
  equals) already sum to above top-p.

Legend: B rows, V vocabulary padded to whole blocks of BLOCK.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnout.native.loader import library
from turnout.protocol.sglang import SamplingParams

BLOCK = 256
SELECTED = 512  # weights of a row that are looked at before all are sorted
_GOLDEN, _M1, _M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Draw(NamedTuple):
    """What one row is drawn with. `position` is the absolute position of the token to be drawn; `banned`
    ids cannot be drawn (end ids before min_new_tokens)."""

    params: SamplingParams
    seed: int
    position: int
    banned: tuple[int, ...] = ()

    @property
    def filters(self) -> bool:
        """Whether anything limits what can be drawn."""
        params = self.params
        return bool(self.banned) or params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


@dataclass(frozen=True)
class Sampled:
    """One token per row and its log-prob."""

    tokens: list[int]
    logprobs: list[float]


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) per pair: splitmix64's finaliser over the seed, then over that and the position."""
    seed = np.array([s & (2**64 - 1) for s in seeds], np.uint64)
    position = np.array(positions, np.uint64)
    mixed = _mix(_mix(seed + np.uint64(_GOLDEN)) + (position + np.uint64(1)) * np.uint64(_GOLDEN))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(logits: Tensor, draws: Sequence[Draw]) -> Sampled:
    """logits [B, vocabulary] in any float dtype; one Draw per row. Rows without filters go to native/sampler.c
    where it was built: which path a row takes depends on that row only."""
    if library() is None:
        return _sample(logits, draws)
    plain = [i for i, draw in enumerate(draws) if not draw.filters]
    if len(plain) == len(draws):
        return _native(logits, draws)
    others = [i for i, draw in enumerate(draws) if draw.filters]
    tokens, logprobs = [0] * len(draws), [0.0] * len(draws)
    for part, rows in ((_native, plain), (_sample, others)):
        if rows:
            made = part(logits[rows], [draws[i] for i in rows])
            for i, token, logprob in zip(rows, made.tokens, made.logprobs):
                tokens[i], logprobs[i] = token, logprob
    return Sampled(tokens, logprobs)


def _native(logits: Tensor, draws: Sequence[Draw]) -> Sampled:
    native = library()
    assert native is not None
    logits = logits.float().contiguous()
    rows, vocabulary = logits.shape
    temperatures = np.array([d.params.temperature for d in draws], np.float32)
    noise = uniforms([d.seed for d in draws], [d.position for d in draws])
    tokens, logprobs = np.empty(rows, np.int64), np.empty(rows, np.float64)
    arrays = [a.ctypes.data for a in (temperatures, noise, tokens, logprobs)]
    sizes = (ctypes.c_int64(rows), ctypes.c_int64(vocabulary))
    if native.turnout_draw(ctypes.c_void_p(logits.data_ptr()), *sizes, *map(ctypes.c_void_p, arrays)):
        raise MemoryError("no memory for the sums of one step's sampling")
    return Sampled(tokens.tolist(), logprobs.astype(np.float32).tolist())


def _sample(logits: Tensor, draws: Sequence[Draw]) -> Sampled:
    """All rows in torch, with their filters."""
    scaled_BV = _padded(logits)
    temperature_B = torch.tensor([d.params.temperature for d in draws], dtype=torch.float32)
    greedy = [i for i, d in enumerate(draws) if d.params.temperature == 0.0]
    best = _greedy(scaled_BV, greedy, draws)
    if any(d.params.temperature not in (0.0, 1.0) for d in draws):
        scaled_BV /= torch.where(temperature_B == 0.0, 1.0, temperature_B)[:, None]
    top_B = scaled_BV.amax(-1)
    weights_BV = (scaled_BV - top_B[:, None]).exp_()
    sums_BN = _block_sums(weights_BV)
    total_B = sums_BN.double().sum(-1)
    _filter(weights_BV, sums_BN, draws)
    noise = torch.from_numpy(uniforms([d.seed for d in draws], [d.position for d in draws]))
    tokens_B = _invert(weights_BV, sums_BN, noise)
    tokens_B[greedy] = best
    return Sampled(tokens_B.tolist(), _logprobs(scaled_BV, tokens_B, top_B, total_B))


def score(logits: Tensor, targets: NDArray[np.int64]) -> list[float]:
    """Log-probs of known tokens under the raw logits [n, vocabulary], one target per row."""
    scaled_NV = _padded(logits)
    top_N = scaled_NV.amax(-1)
    sums = _block_sums((scaled_NV - top_N[:, None]).exp_())
    return _logprobs(scaled_NV, torch.from_numpy(targets), top_N, sums.double().sum(-1))


def _padded(logits: Tensor) -> Tensor:
    """A float32 copy, padded with what can't be drawn."""
    rows, vocabulary = logits.shape
    padded = logits.new_full((rows, -(-vocabulary // BLOCK) * BLOCK), -torch.inf, dtype=torch.float32)
    padded[:, :vocabulary] = logits
    return padded


def _block_sums(weights_BV: Tensor) -> Tensor:
    return weights_BV.view(len(weights_BV), -1, BLOCK).sum(-1)


def _logprobs(scaled_BV: Tensor, tokens_B: Tensor, top_B: Tensor, total_B: Tensor) -> list[float]:
    picked_B = scaled_BV.gather(1, tokens_B[:, None])[:, 0]
    return ((picked_B.double() - top_B.double()) - total_B.log()).float().tolist()


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_M1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_M2)
    return x ^ (x >> np.uint64(31))


def _greedy(logits_BV: Tensor, greedy: list[int], draws: Sequence[Draw]) -> Tensor:
    """The lowest id with the largest logit of each greedy row, banned ids apart."""
    chosen = logits_BV[greedy]
    for at, row in enumerate(greedy):
        if draws[row].banned:
            chosen[at, list(draws[row].banned)] = -torch.inf
    return (chosen == chosen.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1)


def _filter(weights_BV: Tensor, sums_BN: Tensor, draws: Sequence[Draw]) -> None:
    """Zeroes what cannot be drawn, in place, and renews the block sums of those rows."""
    banned = [row for row, draw in enumerate(draws) if draw.banned]
    for row in banned:
        weights_BV[row, list(draws[row].banned)] = 0.0
    if banned:
        sums_BN[banned] = _block_sums(weights_BV[banned])
    rows = [row for row, draw in enumerate(draws) if _filters(draw.params)]
    if rows:
        kept_RV = weights_BV[rows]
        _nucleus(kept_RV, sums_BN[rows].double().sum(-1), [draws[row].params for row in rows])
        weights_BV[rows], sums_BN[rows] = kept_RV, _block_sums(kept_RV)


def _filters(params: SamplingParams) -> bool:
    return params.temperature > 0.0 and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)


def _nucleus(weights_RV: Tensor, total_R: Tensor, params: Sequence[SamplingParams]) -> None:
    """Zeroes what top-k, top-p and min-p leave out, in place. What a row keeps is a prefix of its weights in
    falling order, so the largest few tell where to cut; only rows that keep all of those are sorted whole."""
    vocabulary = weights_RV.shape[1]
    top_k_R = torch.tensor([p.top_k if p.top_k > 0 else vocabulary for p in params])
    # a limit that no sum reaches where top-p is off, since a running sum may round to above the total
    top_p_R = torch.tensor([p.top_p if p.top_p < 1.0 else torch.inf for p in params], dtype=torch.float64)
    min_p_R = torch.tensor([p.min_p for p in params], dtype=torch.float32)
    left = torch.arange(len(params))
    for width in (min(SELECTED, vocabulary), vocabulary):
        values = _largest(weights_RV[left], width)
        before = values.cumsum(-1, dtype=torch.float64) - values
        kept = values >= min_p_R[left, None] * values[:, :1]
        kept &= torch.arange(width) < top_k_R[left, None]
        kept &= before <= (top_p_R * total_R)[left, None]
        count = kept.sum(-1).clamp(min=1)
        known = (count < width) | (width == vocabulary)
        least = values.gather(1, count[:, None] - 1)
        equals = count - (values > least).sum(-1)
        _cut(weights_RV, left[known], least[known], equals[known])
        left = left[~known]
        if not len(left):
            return


def _largest(weights_RV: Tensor, width: int) -> Tensor:
    """The `width` largest of each row, falling. NumPy's sort is many times faster than torch's on a CPU."""
    values = weights_RV.numpy()
    if width < values.shape[1]:
        values = np.partition(values, -width, axis=-1)[:, -width:]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())


def _cut(weights_RV: Tensor, rows: Tensor, least: Tensor, equals: Tensor) -> None:
    """Keeps, of the named rows, the weights above `least` [rows, 1] and the first `equals` ids [rows] with it."""
    chosen = weights_RV[rows]
    chosen[chosen < least] = 0.0
    same = chosen == least
    for row in (same.sum(-1) > equals).nonzero()[:, 0].tolist():
        chosen[row, same[row].nonzero()[int(equals[row]) :, 0]] = 0.0
    weights_RV[rows] = chosen


def _invert(weights_BV: Tensor, sums_BN: Tensor, noise_B: Tensor) -> Tensor:
    """The token at which the running sum of weights passes noise x total: first its block, then inside."""
    rows = torch.arange(len(noise_B))
    running_BN = torch.cumsum(sums_BN, -1, dtype=torch.float64)
    target_B = noise_B * running_BN[:, -1]
    block_B = _passes(running_BN, target_B)
    inside = weights_BV.view(len(rows), -1, BLOCK)[rows, block_B]
    running = torch.cumsum(inside, -1, dtype=torch.float64)
    left_B = target_B - (running_BN[rows, block_B] - sums_BN[rows, block_B])
    return block_B * BLOCK + _passes(running, left_B)


def _passes(running: Tensor, target: Tensor) -> Tensor:
    """First index whose running sum exceeds the target; where rounding leaves none, the last that grew."""
    first = (running <= target[:, None]).sum(-1)
    last_grown = (running < running[:, -1:]).sum(-1)
    return torch.minimum(first, last_grown)
