"""How much each token counts in the loss of one optimizer step. Pure; the weights of a step sum to 1, but for
"constant"."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def token_weights(
    masks: Sequence[Sequence[int]], aggregate: str, length: int = 1
) -> list[NDArray[np.float32]]:
    """Weights like `masks` (one per sample of the step): "token" gives every unmasked token the same weight,
    "sample" every sample with an unmasked token the same, shared evenly by its unmasked tokens; "constant" gives
    every unmasked token 1 / (samples x `length`), however long its response is (Dr. GRPO, arXiv 2503.20783)."""
    arrays = [np.asarray(mask, np.float64) for mask in masks]
    counts = [float(array.sum()) for array in arrays]
    if aggregate == "token":
        total = sum(counts)
        return [(array / max(total, 1.0)).astype(np.float32) for array in arrays]
    samples = sum(count > 0 for count in counts)
    if aggregate == "constant":
        return [(array / (max(samples, 1) * length)).astype(np.float32) for array in arrays]
    return [
        (array / (max(count, 1.0) * max(samples, 1))).astype(np.float32)
        for array, count in zip(arrays, counts)
    ]
