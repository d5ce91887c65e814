"""Matrix products in bf16 on processors that cannot multiply bf16 (no AVX-512, no AMX): in fp32, rounded once.

torch has a plain loop for these, 8 to 13 times slower than its fp32 products (measured with AVX2; those of
experts 58 times). Widening is
exact and sums are fp32 either way, so a result differs by the order of a sum only.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

log = logging.getLogger(__name__)

_ATEN = torch.ops.aten
_WIDENED = {
    _ATEN.mm.default, _ATEN.mm.out, _ATEN.bmm.default, _ATEN.bmm.out, _ATEN.addmm.default, _ATEN._grouped_mm.default
}  # fmt: skip


@functools.cache
def multiplies_bf16() -> bool:
    """Whether oneDNN has kernels for bf16 on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def products(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[object]:
    """Within it, products of bf16 tensors are taken the faster way; says once which way that is."""
    if device.type != "cpu" or dtype != torch.bfloat16 or multiplies_bf16():
        return contextlib.nullcontext()
    _say()
    return _Widened()


@functools.cache
def _say() -> None:
    log.info(
        "this processor does not multiply bf16: matrix products are computed in fp32 and rounded to bf16"
    )


class _Widened(TorchDispatchMode):
    """Sees every operation below autograd, forward and backward; changes the products of plain CPU tensors."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # its own dispatch comes here again with the local parts
        given = kwargs or {}
        out = given.get("out")
        tensors = [value for value in (*args, out) if isinstance(value, Tensor) and value.is_floating_point()]
        if func not in _WIDENED or not all(map(_narrow, tensors)):
            return func(*args, **given)
        others = {name: value for name, value in given.items() if name != "out"}
        wide = func.overloadpacket(*(_widened(value) for value in args), **others)
        if out is not None and out.shape == wide.shape:
            return out.copy_(wide)
        return wide.bfloat16() if out is None else func(*args, **given)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _narrow(value: Any) -> bool:
    return type(value) in (Tensor, Parameter) and value.dtype == torch.bfloat16 and value.device.type == "cpu"
