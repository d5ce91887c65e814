"""One step of the plan as plain arrays: what a worker computes, in this process or in another.

Owns the page table as the workers see it. Promises: no reference to a request leaves the scheduler's side; a page
table line travels only where it changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnout.engine.sampler import Draw
from turnout.engine.scheduler_machine import Chunk, rows


@dataclass(frozen=True)
class TableChange:
    """Line `slot` of the page table has these page numbers from column `first` on."""

    slot: int
    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class StepInput:
    """`tokens` int64, `positions` int32 and `slots` int32 (lines of the page table), all [rows], rows of one
    sequence neighbouring and in order. `sampling` [draws]: rows that give a token, one Draw each. `scored` int64
    [n, 2]: rows that also give the log-prob of a known next token, and that token; `score_temperature` float32
    [n]."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int32]
    slots: NDArray[np.int32]
    table: tuple[TableChange, ...]
    sampling: NDArray[np.int64]
    draws: tuple[Draw, ...]
    scored: NDArray[np.int64]
    score_temperature: NDArray[np.float32]


@dataclass(frozen=True)
class StepOutput:
    """One token and log-prob per draw; one log-prob per scored row."""

    tokens: list[int]
    logprobs: list[float]
    scores: list[float]


class StepBuilder:
    """Turns the scheduler's chunks into a StepInput; remembers what the workers' page table holds."""

    def __init__(self, slots: int) -> None:
        self._lines: list[tuple[list[int], int]] = [([], 0)] * slots

    def build(self, chunks: Sequence[Chunk], draws: Sequence[Draw]) -> StepInput:
        """`draws`: one per chunk that samples, in plan order."""
        live = rows(chunks)
        tokens, positions = np.empty(live, np.int64), np.empty(live, np.int32)
        slots = np.empty(live, np.int32)
        sampling: list[int] = []
        scored: list[tuple[int, int]] = []
        temperatures: list[float] = []
        changes: list[TableChange] = []
        at = 0
        for chunk in chunks:
            request, end, after = chunk.request, at + chunk.count, chunk.first + chunk.count
            tokens[at:end] = request.tokens[chunk.first : after]
            positions[at:end] = np.arange(chunk.first, after)
            slots[at:end] = request.slot
            changes.extend(self._changes(chunk))
            for position in range(chunk.first if chunk.score_from is None else chunk.score_from, after):
                if chunk.score_from is not None and position + 1 < request.prompt_tokens:
                    scored.append((at + position - chunk.first, request.tokens[position + 1]))
                    temperatures.append(request.params.temperature)
            at = end
            if chunk.samples:
                sampling.append(end - 1)
        return StepInput(
            tokens,
            positions,
            slots,
            tuple(changes),
            np.array(sampling, np.int64),
            tuple(draws),
            np.array(scored, np.int64).reshape(-1, 2),
            np.array(temperatures, np.float32),
        )

    def _changes(self, chunk: Chunk) -> list[TableChange]:
        """What is new in the request's line. A preempted request has a new list."""
        pages, slot = chunk.request.pages, chunk.request.slot
        known, count = self._lines[slot]
        if known is not pages:
            count = 0
        if count >= len(pages):
            return []
        self._lines[slot] = (pages, len(pages))
        return [TableChange(slot, count, tuple(pages[count:]))]
