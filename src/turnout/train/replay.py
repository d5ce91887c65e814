"""Routing replay: a mixture's recorded experts in place of the trainer's own choice (arXiv 2510.11370).

Engine and trainer compute router logits on different kernels, and near a tie they choose other experts, which
changes a log-prob more than all rounding. With a record a token goes through the experts that it was sampled with,
in the forward pass and where that is computed again; what each weighs comes from the trainer's own logits, so that
routers learn. Rows without a record go through the trainer's own choice.

Promises: without a record the model code is what it was. Counts are of all rows, once for each forward pass.
Legend: T rows, k experts of a row, L layers with experts, W = values of a row over all layers of the model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnout.core.errors import TrainError
from turnout.core.routed import routers

Wide = NDArray[np.float64]


class RoutingReplay:
    """The routers of one model; of none where it has no experts. `use` says for which rows the next pass is."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._rows: Tensor | None = None  # [T, all layers, k]
        # by layer: rows with a record, and those that chose otherwise
        self._told: dict[int, tuple[Tensor, Tensor]] = {}
        self._counts: Wide = np.zeros(3)
        found: list[tuple[int, Any]] = routers(module.named_modules())
        self._routers = [router for _, router in found]
        config: Any = getattr(module, "config", None)
        self._layers = int(getattr(config, "num_hidden_layers", 0))
        for layer, router in found:
            router.forward = self._routing(router, router.forward, layer)

    def use(self, routed: NDArray[np.int16] | None, device: torch.device) -> None:
        """Rows [T, W] of the micro-batch that comes; None: nothing is recorded. Raises TrainError for a record of
        another model."""
        self._rows, self._told = None, {}  # a pass that was computed again has told it twice
        if routed is None:
            return
        if not self._routers:
            raise TrainError("the samples have routed experts, and the trainer's model has none")
        k, experts = self._routers[0].top_k, self._routers[0].num_experts
        if routed.shape[1] != self._layers * k or routed.max() >= experts or routed.min() < -1:
            raise TrainError(
                f"the samples' routed experts are of another model: {routed.shape[1]} values a token, the highest "
                f"{routed.max()}; the trainer's has {self._layers} layers, {k} of {experts} experts a token"
            )
        self._rows = torch.from_numpy(routed.astype(np.int64)).to(device).view(len(routed), self._layers, k)

    def add(self) -> None:
        """Counts the last forward pass."""
        for recorded, other in self._told.values():
            self._counts += [len(recorded), int(recorded.sum()), int(other.sum())]
        self._told = {}

    def take(self) -> Wide:
        """Since the last call: rows times layers, those of them with a record, those whose own choice differs."""
        counts, self._counts = self._counts, np.zeros(3)
        return counts

    def _routing(self, router: Any, own: Any, layer: int) -> Any:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits, scores, index_Tk = own(hidden)
            if self._rows is None:
                return logits, scores, index_Tk
            told_Tk = self._rows[:, layer]
            recorded_T = told_Tk[:, 0] >= 0
            chosen_Tk = torch.where(recorded_T[:, None], told_Tk, index_Tk)
            other_T = (chosen_Tk.sort(-1).values != index_Tk.sort(-1).values).any(-1)
            self._told[layer] = recorded_T, other_T
            weights_Tk = logits.softmax(-1, dtype=torch.float).gather(1, chosen_Tk)
            if router.norm_topk_prob:
                weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)
            return logits, weights_Tk.to(scores.dtype), chosen_Tk

        return forward


def shares(counts: Wide) -> tuple[float, float]:
    """The share that has a record, and of that the share whose own choice differs."""
    total, recorded, other = counts.tolist()
    return recorded / max(1.0, total), other / max(1.0, recorded)
