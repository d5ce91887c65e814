"""Which experts of a mixture each position went through: kept beside the KV cache, page by page.

Promises: what lies in a page is what its keys and values were computed with, so a prompt from the prefix cache has
its record; a row has the experts of every layer, best first, zeros where a layer has none (SGLang's form). A model
without experts has no record and costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from turnout.core.routed import routers
from turnout.engine.request_machine import Chunk


class RoutedPages:
    """Rows int16 [pages * page_tokens, layers, k] of a model; none where `module` is None or has no experts."""

    def __init__(self, module: nn.Module | None, config: Any, pages: int, page_tokens: int) -> None:
        found = [] if module is None else routers(module.named_modules())
        self._step: dict[int, Tensor] = {}
        for layer, router in found:
            router.register_forward_hook(self._keep(layer))
        shape = (config.num_hidden_layers, config.num_experts_per_tok) if found else (0, 0)
        self._rows: NDArray[np.int16] = np.zeros((pages * page_tokens if found else 0, *shape), np.int16)
        self._page_tokens = page_tokens
        self._row_bytes = self._rows.itemsize * shape[0] * shape[1]

    def _keep(self, layer: int) -> Any:
        def keep(_module: Any, _args: Any, out: tuple[Tensor, Tensor, Tensor]) -> None:
            self._step[layer] = out[2]

        return keep

    def write(self, table: NDArray[np.int32], slots: NDArray[np.int32], positions: NDArray[np.int32]) -> None:
        """Puts the rows of the last forward, which may be padded, to their positions; `table`: pages by slot."""
        if not self._step:
            return
        size = self._page_tokens
        at = table[slots, positions // size].astype(np.int64) * size + positions % size
        for layer, index in self._step.items():
            self._rows[at, layer] = index[: len(at)].to(torch.int16).numpy()
        self._step = {}

    def note(self, chunks: Sequence[Chunk]) -> None:
        """Gives requests that ask for them the rows of what is computed by now, but of their last token."""
        for chunk in chunks:
            request, size = chunk.request, self._page_tokens
            if request.routed_from is None:
                continue
            end = chunk.first + chunk.count
            if not request.params.max_new_tokens:
                end = min(end, request.prompt_tokens - 1)
            positions = np.arange(request.routed_from + len(request.routed) // self._row_bytes, end)
            at = np.asarray(request.pages, np.int64)[positions // size] * size + positions % size
            request.routed += self._rows[at].tobytes()
