"""Matrix products whose result for a row does not depend on the batch.

BLAS and oneDNN choose kernels by the number of rows, so one row's bits change with its company; with a fixed
number of rows they do not (measured on CPU, bf16 and fp32, one and two threads; tests/unit/engine holds the
proof). So every product here runs in blocks of exactly `row_block` rows, padded with zeros. Weights are moved
to 64-byte boundaries, since kernels may also choose by alignment.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPERTS = "turnout_row_blocks"
EXPERT_ROWS = 16
ALIGNMENT = 64


def row_blocks(x: Tensor, block: int, product: Callable[[Tensor], Tensor]) -> Tensor:
    """`product` over x [rows, in] in blocks of exactly `block` rows -> [rows, out]."""
    rows = x.shape[0]
    if rows == block:
        return product(x)
    if rows % block:
        x = F.pad(x, (0, 0, 0, block - rows % block))
    if x.shape[0] == block:
        return product(x)[:rows]
    return torch.cat([product(x[at : at + block]) for at in range(0, x.shape[0], block)])[:rows]


class RowBlockLinear(nn.Linear):
    """nn.Linear by row blocks. Made from a live nn.Linear by `convert`, keeping its parameters."""

    row_block: int

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's own name
        if input.numel() == self.row_block * self.in_features:
            return F.linear(input, self.weight, self.bias)
        flat = input.reshape(-1, self.in_features)
        out = row_blocks(flat, self.row_block, lambda x: F.linear(x, self.weight, self.bias))
        return out.view(*input.shape[:-1], self.out_features)


class RowBlockRouter:
    """Goes before a router class (from [rows, hidden] to a tuple of [rows, ...]) and runs it by row blocks."""

    row_block: int

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        flat = hidden.reshape(-1, hidden.shape[-1])
        rows, block = flat.shape[0], self.row_block
        padded = F.pad(flat, (0, 0, 0, -rows % block))
        inner = super().forward  # type: ignore[misc]
        parts = [inner(padded[at : at + block]) for at in range(0, padded.shape[0], block)]
        return tuple(torch.cat(column)[:rows] for column in zip(*parts))


def experts_forward(self: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' experts interface: hidden [rows, hidden], top_k_index and top_k_weights [rows, k].
    Each expert runs in blocks of EXPERT_ROWS; a row adds its experts in its own top-k order, in float32."""
    return expert_sum(self, hidden, top_k_index, top_k_weights).to(hidden.dtype)


def expert_sum(self: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weighted sum of each row's experts, float32 [rows, hidden]. An index of the number of experts or more
    is one that is not here: it adds nothing."""
    rows, k = top_k_index.shape
    order = torch.argsort(top_k_index.reshape(-1), stable=True)
    here = len(self.down_proj)  # type: ignore[arg-type]
    counts = torch.bincount(top_k_index.reshape(-1), minlength=here).tolist()
    mixed = torch.zeros((rows * k, hidden.shape[1]), dtype=hidden.dtype)
    at = 0
    for expert, count in enumerate(counts[:here]):
        if not count:
            continue
        pairs = order[at : at + count]
        at += count
        up, down = self.gate_up_proj[expert], self.down_proj[expert]  # type: ignore[index]

        def run(x: Tensor, up: Tensor = up, down: Tensor = down) -> Tensor:
            return F.linear(self._apply_gate(F.linear(x, up)), down)  # type: ignore[operator]

        mixed[pairs] = row_blocks(hidden[pairs // k], EXPERT_ROWS, run)
    weighted = mixed.view(rows, k, -1).float() * top_k_weights[..., None].float()
    total = weighted[:, 0]
    for i in range(1, k):
        total = total + weighted[:, i]
    return total


class ExactSiLU(nn.Module):
    """x / (1 + exp(-x)) from operations whose vector and scalar forms agree bit for bit. torch's own float32
    silu differs between the two, so its bits depend on where a thread's share ends; its bf16 one does not."""

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.exp(-x).add_(1.0)


def register() -> None:
    """Makes `experts_implementation=EXPERTS` known."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: PLC0415 - slow, see engine.model

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)


def convert(model: nn.Module, row_block: int) -> None:
    """Makes every linear layer and router of a live model run by row blocks, parameters kept in place."""
    from transformers.activations import SiLUActivation  # noqa: PLC0415 - slow, see engine.model

    fp32 = next(model.parameters()).dtype == torch.float32
    for module in list(model.modules()):
        if type(module) is nn.Linear:
            module.__class__ = RowBlockLinear
            module.row_block = row_block  # type: ignore[assignment]
        elif type(module).__name__.endswith("TopKRouter"):
            module.__class__ = type(type(module).__name__, (RowBlockRouter, type(module)), {})
            module.row_block = row_block  # type: ignore[assignment]
        if isinstance(getattr(module, "act_fn", None), nn.SiLU | SiLUActivation) and fp32:
            module.act_fn = ExactSiLU()
    for parameter in model.parameters():
        if parameter.data_ptr() % ALIGNMENT:
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
