"""How a weight is quantised: int8 per output row, or fp8 in blocks. One weight at a time.

int8  symmetric, scale = max |row| / 127 (LLM.int8, arXiv:2208.07339, without its outlier columns)
fp8   e4m3 in blocks of 128 x 128, scale = max |block| / 448 (DeepSeek-V3, arXiv:2412.19437, section 3.3; SGLang's
      weight_scale_inv); the last block of a side may be smaller

Promises: the same weight gives the same bits; a row or block of zeros gives zeros, never 0/0; nothing is infinite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

INT8, FP8 = "int8", "fp8"
SCHEMES = (INT8, FP8)
BLOCK = 128
_MOST = {INT8: 127.0, FP8: 448.0}
_LEAST = torch.finfo(torch.float32).tiny  # of a scale: below it a float32 has no full precision


@dataclass(frozen=True)
class Quantised:
    """`values` int8 or float8_e4m3fn [out, in]; `scales` float32 [out, 1] or [out / BLOCK, in / BLOCK]."""

    values: Tensor
    scales: Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """[out, in], rounded once to `dtype`."""
        return self.values.float().mul_(_spread(self.scales, self.values.shape)).to(dtype)


def quantise(weight: Tensor, scheme: str) -> Quantised:
    """A finite weight [out, in] of any float dtype."""
    wide = weight.float()
    scales = (_largest(wide, scheme) / _MOST[scheme]).clamp_(min=_LEAST)
    scaled = wide.div_(_spread(scales, wide.shape)).clamp_(-_MOST[scheme], _MOST[scheme])
    values = scaled.round_().to(torch.int8) if scheme == INT8 else scaled.to(torch.float8_e4m3fn)
    return Quantised(values, scales)


def empty(shape: torch.Size, scheme: str) -> Quantised:
    """Of the right shapes; the content is undefined."""
    kind = torch.int8 if scheme == INT8 else torch.float8_e4m3fn
    rows, columns = shape
    scales = (rows, 1) if scheme == INT8 else (-(-rows // BLOCK), -(-columns // BLOCK))
    return Quantised(torch.empty(shape, dtype=kind), torch.empty(scales))


def _largest(wide: Tensor, scheme: str) -> Tensor:
    if scheme == INT8:
        return wide.abs().amax(1, keepdim=True)
    down = [rows.abs() for rows in wide.split(BLOCK)]
    return torch.stack([torch.stack([part.amax() for part in rows.split(BLOCK, 1)]) for rows in down])


def _spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """Scales as they multiply a weight of this shape."""
    if scales.shape[1] == 1 and scales.shape[0] == shape[0]:
        return scales
    return scales.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]
