"""One step of the plan as plain arrays: what a worker computes, in this process or in another.

Owns the page table as the workers see it. Promises: no reference to a request leaves the scheduler's side; a page
table line travels only where it changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnout.engine.request_machine import Chunk
from turnout.engine.sampler import Draw


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
    [n, 2]: rows that also give the log-prob of a known next token, and that token."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int32]
    slots: NDArray[np.int32]
    table: tuple[TableChange, ...]
    sampling: NDArray[np.int64]
    draws: tuple[Draw, ...]
    scored: NDArray[np.int64]


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
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        sampling: list[int] = []
        scored: list[tuple[int, int]] = []
        changes: list[TableChange] = []
        for chunk in chunks:
            request, first, after = chunk.request, chunk.first, chunk.first + chunk.count
            at = len(tokens)
            tokens += request.tokens[first:after]
            positions += range(first, after)
            slots += [request.slot] * chunk.count
            changes.extend(self._changes(chunk))
            scored += [(at + position - first, request.tokens[position + 1]) for position in chunk.scores]
            if chunk.samples:
                sampling.append(len(tokens) - 1)
        return StepInput(
            np.array(tokens, np.int64),
            np.array(positions, np.int32),
            np.array(slots, np.int32),
            tuple(changes),
            np.array(sampling, np.int64),
            tuple(draws),
            np.array(scored, np.int64).reshape(-1, 2),
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
