"""How a mixture of experts spreads its tokens: counted where they are trained on, told per train step.

Promises: what is counted are the tokens that go through the head, once for each: the numbers do not depend on
packing, shared prompts, recomputation or ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnout.core.routed import routers


class ExpertLoad:
    """Counts of one model, [layers with experts, experts]; of none where it has no experts."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._chosen: dict[int, Tensor] = {}
        found: list[Any] = [router for _, router in routers(module.named_modules())]
        for at, router in enumerate(found):
            router.register_forward_hook(self._keep(at))
        self.counts: NDArray[np.float64] = np.zeros((len(found), found[0].num_experts if found else 0))

    def _keep(self, layer: int) -> Any:
        def keep(_module: Any, _args: Any, out: tuple[Tensor, Tensor, Tensor]) -> None:
            self._chosen[layer] = out[2]

        return keep

    def add(self, rows_M: Tensor) -> None:
        """Counts the experts of these rows of the last forward pass."""
        for layer, index_Tk in self._chosen.items():
            chosen = index_Tk.index_select(0, rows_M).reshape(-1)
            self.counts[layer] += torch.bincount(chosen, minlength=self.counts.shape[1]).cpu().numpy()
        self._chosen = {}

    def take(self) -> NDArray[np.float64]:
        """The counts since the last call."""
        counts, self.counts = self.counts, np.zeros_like(self.counts)
        return counts


def load_max(counts: NDArray[np.float64]) -> float:
    """The tokens of the busiest expert over those of the mean one, in the layer where that is highest: 1 where all
    have the same, the number of experts over k where one set of k has all. 0 without experts or tokens."""
    total = counts.sum(1) if counts.size else np.zeros(1)
    return float((counts.max(1) * counts.shape[1] / total).max()) if total.all() else 0.0


def unused_share(counts: NDArray[np.float64]) -> float:
    """Experts that no token came to, as a share of all."""
    return float((counts == 0).mean()) if counts.any() else 0.0
