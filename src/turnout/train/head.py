"""Log-probs of chosen tokens over the whole vocabulary, without the matrix [tokens, vocabulary].

Rows go through in chunks, the vocabulary in blocks, with a running maximum and sum (an online softmax), so
only [chunk, block] logits exist; backward computes each block of logits again. Matrix products are in the
compute dtype, everything between them in fp32 (bf16 on a CPU: one pass of C over a block). The weight's
gradient goes to a `GradientSlot` in fp32 where one is given, so that no second [vocabulary, hidden] tensor is
made. Where ranks hold parts of the vocabulary, each goes through its own words; what crosses ranks is [M]
forward and [M, H] backward.

Legend: M tokens, H hidden, V vocabulary, c rows of a chunk, b words of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from turnout.train.native_ops import call, usable
from turnout.train.parameters import GradientSlot

VOCABULARY_BLOCK = 4096


@dataclass(frozen=True)
class VocabularyPart:
    """The words of this rank begin at `first`; `group` are the ranks that hold the whole vocabulary together."""

    first: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class HeadOptions:
    """`temperature` divides the logits; `chunk` bounds the rows at once; `entropy` False returns zeros. `part` is
    None where this process has the whole vocabulary."""

    temperature: float = 1.0
    chunk: int = 512
    entropy: bool = True
    part: VocabularyPart | None = None

    @property
    def first(self) -> int:
        return 0 if self.part is None else self.part.first


class _Block:
    """Buffers of one [c, b] piece of logits, allocated once and used by every block."""

    def __init__(self, options: HeadOptions, hidden_MH: Tensor, words: int) -> None:
        like, self.temperature = hidden_MH, options.temperature
        rows, words = min(options.chunk, len(hidden_MH)), min(VOCABULARY_BLOCK, words)
        self.raw = torch.empty(rows * words, dtype=like.dtype, device=like.device)
        size = 0 if usable(like) else rows * words
        self.wide = torch.empty(size, dtype=torch.float32, device=like.device)
        self.exp = torch.empty(size, dtype=torch.float32, device=like.device)

    def product(self, hidden_cH: Tensor, weight_bH: Tensor) -> Tensor:
        """Logits in the compute dtype, valid until the next call."""
        shape = (hidden_cH.shape[0], weight_bH.shape[0])
        return torch.mm(hidden_cH, weight_bH.t(), out=self.raw[: shape[0] * shape[1]].view(shape))

    def logits(self, hidden_cH: Tensor, weight_bH: Tensor) -> Tensor:
        """fp32 logits / temperature, valid until the next call."""
        raw = self.product(hidden_cH, weight_bH)
        wide = self.wide[: raw.numel()].view(raw.shape)
        return wide.copy_(raw) if self.temperature == 1.0 else torch.div(raw, self.temperature, out=wide)


def _forward_chunk(
    hidden_cH: Tensor, weight: Tensor, targets_c: Tensor, options: HeadOptions, block: _Block
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of one chunk, fp32 [c]: the highest logit, the sum of exp(logit - highest), the sum of exp(logit - highest)
    (logit - highest) (of no use without entropy), and the target's logit (0 where the target is a word of another
    rank)."""
    rows, words = hidden_cH.shape[0], weight.shape[0]
    peak = torch.full((rows,), float("-inf"), device=hidden_cH.device)
    total = torch.zeros(rows, device=hidden_cH.device)
    moment = torch.zeros(rows, device=hidden_cH.device)  # sum of exp(z - peak) * (z - peak)
    chosen = torch.zeros(rows, device=hidden_cH.device)
    for start in range(0, words, VOCABULARY_BLOCK):
        part = weight[start : start + VOCABULARY_BLOCK]
        local = targets_c - options.first - start
        if usable(hidden_cH):
            raw, sums = block.product(hidden_cH, part), (peak, total, moment, chosen)
            call("turnout_head_sums", raw, local, *sums, *raw.shape, 1 / block.temperature)
            continue
        z = block.logits(hidden_cH, part)
        inside = (local >= 0) & (local < part.shape[0])
        picked = z.gather(1, local.clamp(0, part.shape[0] - 1)[:, None])[:, 0]
        chosen = torch.where(inside, picked, chosen)
        higher = torch.maximum(peak, z.amax(1))
        old = torch.exp(peak - higher)
        z.sub_(higher[:, None])
        if options.entropy:
            e = torch.exp(z, out=block.exp[: z.numel()].view(z.shape))
            shift = torch.where(total > 0, peak - higher, 0.0)  # peak is -inf before the first block
            moment = old * (moment + shift * total) + torch.linalg.vecdot(e, z)
        else:
            e = z.exp_()
        total = total * old + e.sum(1)
        peak = higher
    return peak, total, moment, chosen


def _over_ranks(columns: tuple[Tensor, ...], part: VocabularyPart) -> tuple[Tensor, ...]:
    """The same four over the words of all ranks: their sums, shifted to the highest logit of all."""
    peak, total, moment, chosen = columns
    highest = peak.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, part.group)
    shift = peak - highest
    scale = shift.exp()
    sums = torch.stack((scale * total, scale * (moment + shift * total), chosen))
    dist.all_reduce(sums, group=part.group)
    return highest, *sums


def _logits_gradient(
    hidden_cH: Tensor,
    part_bH: Tensor,
    local_c: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor | None],
    block: _Block,
) -> Tensor:
    """The gradient of a block of logits in the compute dtype [c, b], times the temperature. `saved`: log-sums and
    entropies; gradients of log-probs and entropies over the temperature."""
    lse, entropy, scaled, of_entropy = saved
    if usable(hidden_cH):
        raw = block.product(hidden_cH, part_bH)
        call("turnout_head_gradient", raw, local_c, *saved, *raw.shape, 1 / block.temperature)
        return raw
    z = block.logits(hidden_cH, part_bH)
    z.sub_(lse[:, None])
    if of_entropy is None:
        d = z.exp_().mul_(scaled[:, None]).neg_()
    else:  # dH/dz = -p (log p + H)
        p = torch.exp(z, out=block.exp[: z.numel()].view(z.shape))
        z.add_(entropy[:, None]).mul_(of_entropy[:, None]).add_(scaled[:, None])
        d = z.mul_(p).neg_()
    inside = (local_c >= 0) & (local_c < part_bH.shape[0])
    at = local_c.clamp(0, part_bH.shape[0] - 1)[:, None]
    d.scatter_add_(1, at, torch.where(inside, scaled, 0.0)[:, None])
    return block.raw[: d.numel()].view(d.shape).copy_(d)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        how: tuple[HeadOptions, GradientSlot | None],
    ) -> tuple[Tensor, Tensor]:
        options, ctx.slot = how
        block = _Block(options, hidden, weight.shape[0])
        parts = [
            _forward_chunk(h, weight, t, options, block)
            for h, t in zip(hidden.split(options.chunk), targets.split(options.chunk))
        ]
        columns = tuple(torch.cat(column) for column in zip(*parts))
        if options.part is not None:
            columns = _over_ranks(columns, options.part)
        peak, total, moment, chosen = columns
        lse = peak + total.log()
        entropy = total.log() - moment / total if options.entropy else torch.zeros_like(total)
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.options = options
        ctx.set_materialize_grads(False)  # None tells that nothing trains on the entropy
        return chosen - lse, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        options: HeadOptions = ctx.options
        slot: GradientSlot = ctx.slot or GradientSlot(torch.empty(weight.shape, device=weight.device))
        scaled = torch.zeros_like(lse) if grads[0] is None else grads[0].float() / options.temperature
        of_entropy = None if grads[1] is None else grads[1].float() / options.temperature
        block = _Block(options, hidden, weight.shape[0])
        d_hidden = torch.empty_like(hidden)
        for first in range(0, hidden.shape[0], options.chunk):
            rows = slice(first, first + options.chunk)
            fresh = slot.take()
            wide = torch.zeros(hidden[rows].shape, device=hidden.device)
            for start in range(0, weight.shape[0], VOCABULARY_BLOCK):
                part = weight[start : start + VOCABULARY_BLOCK]
                local = targets[rows] - options.first - start
                saved = (
                    lse[rows],
                    entropy[rows],
                    scaled[rows],
                    None if of_entropy is None else of_entropy[rows],
                )
                narrow = _logits_gradient(hidden[rows], part, local, saved, block)
                wide.add_(torch.mm(narrow, part))
                grad = torch.mm(narrow.t(), hidden[rows])
                target = slot.buffer[start : start + VOCABULARY_BLOCK]
                target.copy_(grad) if fresh else target.add_(grad)
            if options.part is not None:
                dist.all_reduce(wide, group=options.part.group)
            d_hidden[rows] = wide.to(hidden.dtype)
        d_weight = None if ctx.slot is not None else slot.buffer.to(weight.dtype)
        return d_hidden, d_weight, None, None


def chunked_logprobs(
    hidden_MH: Tensor,
    weight_VH: Tensor,
    targets_M: Tensor,
    options: HeadOptions,
    slot: GradientSlot | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-softmax(hidden @ weight.T / temperature)[target], entropy), both fp32 [M] with gradient (the
    entropy where options.entropy). With a slot, the weight's gradient is added there and autograd is given none.
    Without any token the weight has a gradient all the same, zero: ranks that share it expect one of each."""
    if hidden_MH.shape[0] == 0:
        zero = (hidden_MH @ weight_VH[:1].t()).float().sum(1)
        return zero, zero
    return _ChunkedLogprobs.apply(hidden_MH, weight_VH, targets_M, (options, slot))  # pyright: ignore[reportReturnType]
