"""The sequence-wise balance loss of a mixture of experts (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20).

For a layer of E experts, k of them for each position, and a sequence of T positions

    balance = sum over experts i of f_i P_i
    f_i = E / (k T) times the positions that go to i,    P_i = the mean over positions of the router's softmax at i

which is 1 where all experts get the same. Only P has a gradient. f counts what the experts got: with routing replay
that is the record. The loss of an optimizer step has the coefficient times the mean over its sequences of the sum
over layers.

Positions are those of the prompt and the response, masked ones too, but not the last token: nothing is predicted
from it and it is not computed. A prompt that a group shares is computed once, and so are its counts and its sums of
probabilities; they are added to those of each member's own tail before f and P are made, so that these are of whole
sequences, and the prompt's rows get a gradient from every member.

Promises: what a sequence adds does not depend on the others, so packing, micro-batches and ranks change nothing but
rounding. Without a coefficient nothing is kept or computed.
Legend: T rows of a micro-batch, S sequences, g segments (prompts and tails), E experts, k experts of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turnout.core.errors import ConfigError, Fault
from turnout.core.routed import routers
from turnout.train.packing import MicroBatch


class ExpertBalance:
    """Of one model. With `coef` None it is off; with 0 it is measured, and nothing trains on it."""

    def __init__(self, module: torch.nn.Module, coef: float | None) -> None:
        """Raises ConfigError where it is on and the model has no experts."""
        self.coef = coef or 0.0
        self._on, self.layers = coef is not None, 0
        self._kept: list[tuple[Tensor, Tensor]] | None = None  # by layer: logits [T, E], experts [T, k]
        if self._on:
            found: list[tuple[int, Any]] = routers(module.named_modules())
            if not found:
                flag = "--moe-router-load-balancing-type"
                raise ConfigError(Fault(flag, "seq_aux_loss", "the model has no experts", "leave it out"))
            self.layers = len(found)
            for _, router in found:
                router.register_forward_hook(self._keep)

    def begin(self) -> None:
        """The next forward pass is one whose balance is asked for."""
        self._kept = [] if self._on else None

    def of(self, micro: MicroBatch) -> Tensor:
        """The sum over sequences and layers of the pass since `begin`, fp32; 0 where it is off. With a coefficient
        it has a gradient. It is made outside the layers: FSDP and checkpointing see no other way back into them."""
        kept, self._kept = self._kept or [], None  # a layer that is computed again tells its own once more
        if not micro.units or not kept:
            return torch.zeros(())
        segment_T, sequences_3S = (x.to(kept[0][0].device) for x in _segments(micro))
        prompt, tail, positions = sequences_3S
        count = int(tail[-1]) + 1
        total = torch.zeros((), device=segment_T.device)
        for logits_TE, index_Tk in kept:
            experts, k = logits_TE.shape[1], index_Tk.shape[1]
            cells = (segment_T[:, None] * experts + index_Tk).reshape(-1)
            counts_gE = torch.bincount(cells, minlength=count * experts).view(count, experts)
            probs_TE = logits_TE.softmax(-1, dtype=torch.float32)
            sums_gE = probs_TE.new_zeros(count, experts).index_add(0, segment_T, probs_TE)
            f_SE = (counts_gE[prompt] + counts_gE[tail]) * (experts / k / positions)[:, None]
            p_SE = (sums_gE[prompt] + sums_gE[tail]) / positions[:, None]
            total = total + (f_SE * p_SE).sum()
        return total

    def _keep(self, _router: Any, _args: Any, out: tuple[Tensor, Tensor, Tensor]) -> None:
        if self._kept is not None:
            self._kept.append((out[0] if self.coef else out[0].detach(), out[2]))


def _segments(micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """The segment of each row [T], in the order of turnout.train.rows; and [3, S] of each sequence: the segments of
    its prompt and of its tail, and its positions."""
    lengths: list[int] = []
    sequences: list[tuple[int, int, int]] = []
    for unit in micro.units:
        prompt = len(lengths)
        lengths.append(unit.prompt)
        for member in unit.members:
            sequences.append((prompt, len(lengths), unit.prompt + member.tail))
            lengths.append(member.tail)
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)), torch.tensor(sequences).T
