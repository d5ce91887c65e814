"""Computes steps: model, KV cache and page table of one worker.

Promises: no Python per sequence and layer; a row's bits depend on its own sequence only; only rows that give a
token or a score go through the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnout.engine.attention import KvCache, StepRows
from turnout.engine.llama import LlamaForward
from turnout.engine.model import DTYPES, LoadedModel
from turnout.engine.packed import PackedStorage
from turnout.engine.quantised import QuantisedStorage
from turnout.engine.routed import RoutedPages
from turnout.engine.sampler import Draw, Sampled, sample, score
from turnout.engine.settings import UNQUANTISED, EngineSettings
from turnout.engine.step import StepInput, StepOutput
from turnout.engine.storage import ModuleStorage, Storage

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEAD_ROWS = 64  # logits of scored rows are made for so many rows at once, which bounds their memory


class Forward(Protocol):
    """A model's computation over the rows of one step."""

    def hidden(self, step: StepInput, table: Tensor, cache: KvCache) -> Tensor:
        """Writes the rows' keys and values into the cache; the last hidden states [rows or more, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocabulary]."""
        ...


class ModuleForward:
    """The module of transformers, made batch-invariant: rows are padded to whole row blocks."""

    def __init__(self, module: PreTrainedModel, row_block: int) -> None:
        self._module, self._row_block = module, row_block

    def hidden(self, step: StepInput, table: Tensor, cache: KvCache) -> Tensor:
        rows = len(step.tokens)
        padding = -rows % self._row_block
        tokens = torch.from_numpy(np.pad(step.tokens, (0, padding)))
        positions = torch.from_numpy(np.pad(step.positions, (0, padding)))
        slots = torch.from_numpy(np.pad(step.slots, (0, padding), constant_values=-1))
        return self._module.base_model(
            input_ids=tokens[None],
            position_ids=positions.long()[None],
            use_cache=False,
            step=StepRows(slots, positions, table, cache),
        ).last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._module.get_output_embeddings()(hidden)  # type: ignore[misc]


class Runner:
    """See the module. Used from one thread, the one that called `torch.set_num_threads`."""

    def __init__(
        self, model: LoadedModel, settings: EngineSettings, made: tuple[Forward, Storage] | None = None
    ) -> None:
        """`made`: other than what the model asks for."""
        shape = model.shape
        self.forward, self.storage = made if made is not None else _made(model, settings)
        self.cache = KvCache(
            settings.pages, shape.kv_heads, shape.head_dim, shape.layers, DTYPES[settings.dtype]
        )
        self.routed = RoutedPages(model.module, model.config, settings.pages, settings.page_tokens)
        width = -(-shape.context_length // settings.page_tokens)
        self._table = np.zeros((settings.max_running_requests, width), np.int32)

    def release_cache(self) -> int:
        """Frees the KV cache; returns how many bytes that were. Nothing may run until `restore_cache`."""
        return self.cache.release()

    def restore_cache(self) -> None:
        """Takes the memory of the KV cache again; it is empty."""
        self.cache.allocate()

    @torch.inference_mode()
    def run(self, step: StepInput) -> StepOutput:
        """Computes the rows, writing their KV; samples and scores what the step asks for."""
        for change in step.table:
            self._table[change.slot, change.first : change.first + len(change.pages)] = change.pages
        hidden = self.forward.hidden(step, torch.from_numpy(self._table), self.cache)
        self.routed.write(self._table, step.slots, step.positions)
        scores: list[float] = []
        for at in range(0, len(step.scored), HEAD_ROWS):
            part = step.scored[at : at + HEAD_ROWS]
            logits = self.forward.logits(hidden[part[:, 0]])
            scores.extend(self._score(logits, part[:, 1]))
        if not len(step.sampling):
            return StepOutput([], [], scores)
        sampled = self._sample(self.forward.logits(hidden[step.sampling]), step.draws)
        return StepOutput(sampled.tokens, sampled.logprobs, scores)

    def _sample(self, logits: Tensor, draws: Sequence[Draw]) -> Sampled:
        return sample(logits, draws)

    def _score(self, logits: Tensor, targets: NDArray[np.int64]) -> list[float]:
        return score(logits, targets)


def _made(model: LoadedModel, settings: EngineSettings) -> tuple[Forward, Storage]:
    if model.module is None:
        packed = PackedStorage(model.config, model.shape)
        return LlamaForward(model.config, model.shape, packed, settings.max_step_tokens), packed
    forward = ModuleForward(model.module, settings.row_block)
    if settings.quantization != UNQUANTISED:
        return forward, QuantisedStorage(model.module, settings.quantization)
    return forward, ModuleStorage(model.module)
