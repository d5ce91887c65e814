"""RMS norm, SiLU gate and rotary embedding of the model code as one pass each, forward and backward (bf16, CPU, C).

transformers computes these from five to eight elementwise operations, each with its own saved copy; on a CPU
they take a fifth of a step and half of its activation memory. Here only the inputs are saved.

Promises: results are rounded where the model code rounds them. Where there is no compiler, and for other
dtypes and devices, the model code stays as it is (`fuse` says how many modules it changed).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from turnout.core.errors import InvariantBroken
from turnout.train.attention import packed_attention
from turnout.train.native_ops import available, call

_PARTS = 16  # partial sums of a norm's weight gradient: fixed, so that threads do not change the result


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        size = x.shape[-1]
        rows = x.numel() // size
        y, rstd = torch.empty_like(x), torch.empty(rows)
        call("turnout_rms_norm", x, weight, y, rstd, rows, size, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, rstd = ctx.saved_tensors
        dy, size = grads[0].contiguous(), x.shape[-1]
        dx, parts = torch.empty_like(x), torch.zeros(_PARTS, size)
        call("turnout_rms_norm_backward", x, weight, rstd, dy, dx, parts, len(rstd), size, _PARTS)
        return dx, parts.sum(0).to(weight.dtype), None


class _SiluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        call("turnout_silu_gate", gate, up, y, gate.numel())
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        call("turnout_silu_gate_backward", gate, up, grads[0].contiguous(), d_gate, d_up, gate.numel())
        return d_gate, d_up


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
        call("turnout_rotary", x, cos, sin, y, *x.shape)
        ctx.save_for_backward(cos, sin)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        dy = grads[0].contiguous()
        dx = torch.empty_like(dy)
        call("turnout_rotary_backward", dy, cos, sin, dx, *dy.shape)
        return dx, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean of x^2 over the last axis + eps), bf16 [..., n]."""
    return _RmsNorm.apply(x, weight, eps)  # pyright: ignore[reportReturnType]


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, bf16, both of one shape."""
    return _SiluGate.apply(gate, up)  # pyright: ignore[reportReturnType]


def rotary(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """The rotary embedding (arXiv 2104.09864, halves as in transformers), bf16 [T, H, D]; cos, sin contiguous."""
    return _Rotary.apply(x_THD, cos_TD, sin_TD)  # pyright: ignore[reportReturnType]


def _norm_forward(module: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, module.weight, module.variance_epsilon)


def _mlp_forward(module: Any, x: Tensor) -> Tensor:
    return module.down_proj(silu_gate(module.gate_proj(x), module.up_proj(x)))


def _attention_forward(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The model code's attention over one packed row, without its transpositions."""
    if attention_mask is not None or hidden_states.shape[0] != 1:
        raise InvariantBroken("packed attention needs one row and no mask")
    cos, sin = (x[0].contiguous() for x in position_embeddings)
    if (
        cos.shape[-1] != module.head_dim or module.head_dim % 2
    ):  # rotary reads as many angles as a head is wide
        raise InvariantBroken(f"a head of {module.head_dim} has {cos.shape[-1]} angles")

    def heads(name: str) -> Tensor:
        x = getattr(module, f"{name}_proj")(hidden_states)[0]
        x = x.view(len(x), -1, module.head_dim)
        norm = getattr(module, f"{name}_norm", None)
        return x if norm is None else norm(x)

    q, k = (rotary(heads(name), cos, sin) for name in "qk")
    out = packed_attention(q, k, heads("v"), kwargs["packed"], module.scaling)
    return module.o_proj(out.reshape(1, len(out), -1)), None


def fuse(model: torch.nn.Module, dtype: torch.dtype) -> int:
    """Gives norms, MLPs and attention of a CPU model that computes in bf16 their one-pass forms; returns how many
    it changed."""
    if dtype != torch.bfloat16 or not available(next(model.parameters()).device):
        return 0
    changed = 0
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            form = _norm_forward
        elif kind.endswith("MLP") and _is_silu(getattr(module, "act_fn", None)):
            form = _mlp_forward
        elif kind.endswith("Attention") and hasattr(module, "q_proj"):
            form = _attention_forward
        else:
            continue
        module.forward = functools.partial(form, module)
        changed += 1
    return changed


def _is_silu(function: Any) -> bool:
    return function is F.silu or type(function).__name__ in ("SiLU", "SiLUActivation")
