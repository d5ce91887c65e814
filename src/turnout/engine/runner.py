"""Runs one step of the scheduler's plan through the model. Owns the KV cache and the page tables in memory.

Promises: no Python per sequence and layer; the rows of a step are padded to whole row blocks, so that a row's
bits depend on its own sequence only; only rows that give a token go through the head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from turnout.engine.attention import KvCache, StepRows
from turnout.engine.model import DTYPES, LoadedModel
from turnout.engine.sampler import Draw, Sampled, sample
from turnout.engine.scheduler_machine import Chunk, rows
from turnout.engine.settings import EngineSettings


class Runner:
    """See the module. Used from one thread, the one that called `torch.set_num_threads`."""

    def __init__(self, model: LoadedModel, settings: EngineSettings) -> None:
        shape = model.shape
        self.module = model.module
        self.row_block = settings.row_block
        self.cache = KvCache(
            settings.pages, shape.kv_heads, shape.head_dim, shape.layers, DTYPES[settings.dtype]
        )
        width = -(-shape.context_length // settings.page_tokens)
        self._table = np.zeros((settings.max_running_requests, width), np.int32)
        self._lines: list[tuple[list[int], int]] = [([], 0)] * settings.max_running_requests

    def run(self, chunks: Sequence[Chunk], draws: Sequence[Draw]) -> Sampled:
        """Computes the chunks, writing their KV; samples one token per chunk that samples, in plan order."""
        logits = self.logits(chunks)
        return Sampled([], []) if logits is None else sample(logits, draws)

    @torch.inference_mode()
    def logits(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """[sampling chunks, vocabulary] in the model's dtype, None where no chunk samples."""
        live = rows(chunks)
        padded = -(-live // self.row_block) * self.row_block
        tokens = np.zeros(padded, np.int64)
        positions, sequence = np.zeros(padded, np.int32), np.full(padded, -1, np.int32)
        kept: list[int] = []
        at = 0
        for chunk in chunks:
            end, after = at + chunk.count, chunk.first + chunk.count
            tokens[at:end] = chunk.request.tokens[chunk.first : after]
            positions[at:end] = np.arange(chunk.first, after)
            sequence[at:end] = chunk.request.slot
            self._fill_line(chunk)
            at = end
            if chunk.samples:
                kept.append(end - 1)
        where = torch.from_numpy(positions)
        step = StepRows(torch.from_numpy(sequence), where, torch.from_numpy(self._table), self.cache)
        hidden = self.module.base_model(
            input_ids=torch.from_numpy(tokens)[None],
            position_ids=where.long()[None],
            use_cache=False,
            step=step,
        ).last_hidden_state
        head = self.module.get_output_embeddings()
        return head(hidden[0, kept]) if kept else None  # type: ignore[misc]

    def _fill_line(self, chunk: Chunk) -> None:
        """Brings the request's line of the page table up to date. A preempted request has a new list."""
        pages, slot = chunk.request.pages, chunk.request.slot
        known, count = self._lines[slot]
        if known is not pages:
            count = 0
        if count < len(pages):
            self._table[slot, count : len(pages)] = pages[count:]
            self._lines[slot] = (pages, len(pages))
