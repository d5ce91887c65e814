"""RMS norm and SiLU gate of the model code as one pass each, forward and backward (bf16 on CPU, in C).

transformers computes these from five to eight elementwise operations in fp32, each with its own saved copy;
on a CPU they take a fifth of a step and half of its activation memory. Here only the inputs are saved.

Promises: results are rounded where the model code rounds them. Where there is no compiler, and for other
dtypes and devices, the model code stays as it is (`fuse` says how many modules it changed).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from turnout.native.loader import library

_PARTS = 16  # partial sums of a norm's weight gradient: fixed, so that threads do not change the result


def _call(name: str, *values: Tensor | float) -> None:
    """Calls the C function with pointers of tensors, int64 for int and float for float."""
    native = library()
    assert native is not None
    arguments = [
        ctypes.c_void_p(v.data_ptr())
        if isinstance(v, Tensor)
        else ctypes.c_int64(v)
        if isinstance(v, int)
        else ctypes.c_float(v)
        for v in values
    ]
    getattr(native, name)(*arguments)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        size = x.shape[-1]
        rows = x.numel() // size
        y, rstd = torch.empty_like(x), torch.empty(rows)
        _call("turnout_rms_norm", x, weight, y, rstd, rows, size, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, rstd = ctx.saved_tensors
        dy, size = grads[0].contiguous(), x.shape[-1]
        dx, parts = torch.empty_like(x), torch.zeros(_PARTS, size)
        _call("turnout_rms_norm_backward", x, weight, rstd, dy, dx, parts, len(rstd), size, _PARTS)
        return dx, parts.sum(0).to(weight.dtype), None


class _SiluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        _call("turnout_silu_gate", gate, up, y, gate.numel())
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        _call("turnout_silu_gate_backward", gate, up, grads[0].contiguous(), d_gate, d_up, gate.numel())
        return d_gate, d_up


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean of x^2 over the last axis + eps), bf16 [..., n]."""
    return _RmsNorm.apply(x, weight, eps)  # pyright: ignore[reportReturnType]


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, bf16, both of one shape."""
    return _SiluGate.apply(gate, up)  # pyright: ignore[reportReturnType]


def _norm_forward(module: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, module.weight, module.variance_epsilon)


def _mlp_forward(module: Any, x: Tensor) -> Tensor:
    return module.down_proj(silu_gate(module.gate_proj(x), module.up_proj(x)))


def fuse(model: torch.nn.Module, dtype: torch.dtype) -> int:
    """Gives the norms and gated MLPs of a CPU model that computes in bf16 their one-pass forms; returns how many it
    changed."""
    if library() is None or dtype != torch.bfloat16 or next(model.parameters()).device.type != "cpu":
        return 0
    changed = 0
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            form = _norm_forward
        elif kind.endswith("MLP") and _is_silu(getattr(module, "act_fn", None)):
            form = _mlp_forward
        else:
            continue
        module.forward = functools.partial(form, module)
        changed += 1
    return changed


def _is_silu(function: Any) -> bool:
    return function is F.silu or type(function).__name__ in ("SiLU", "SiLUActivation")
