"""The model of the virtual world: what an engine with given weights answers, as a function of its inputs alone.

A token depends on the token before it, the request's sampling seed, its absolute position and the root digest of
the weights: a token that was lost, doubled, made by other weights than its span says, or made from another prefix,
is not the one that `tokens` gives, so any trajectory can be proved from its prompt, seed and spans. Its length
depends on prompt and seed only: it is the same on every engine and schedule.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from turnout.weights.digest import root_of
from turnout.weights.tensors import HostTensor

MASK = (1 << 64) - 1
STALE = 0x9E3779B97F4A7C15  # mixed in where KV of other weights was read
LONGEST = 20  # times the median, as in long-tailed rollouts
LOGPROBS = tuple(-(low + 1) / 256 for low in range(1024))  # by the low bits of a token


def prompt_ids(index: int, length: int) -> tuple[int, ...]:
    """Token ids of a prompt: its length first, so that the model knows where a response begins, then its number."""
    return (length, index, *range(2, length))


@lru_cache(maxsize=1 << 14)
def length_of(prompt: int, seed: int, median: float) -> int:
    """Response tokens up to the natural stop: lognormal, at least 1, at most LONGEST times the median."""
    drawn = random.Random(f"{prompt}/{seed}").lognormvariate(math.log(median), 0.8)
    return max(1, min(int(drawn), int(LONGEST * median)))


@dataclass(frozen=True)
class EngineShape:
    """Tokens a second of one request, tokens of one event of a stream, how many requests run at once, tokens that
    the KV space holds, and the median length of a response. `crowd_s`: by how much each running request lengthens a
    token of all of them; `lengths`: of responses, one of which each request draws, in place of the median."""

    speed: float
    chunk: int
    running: int
    kv_tokens: int
    median: float
    crowd_s: float = 0.0
    lengths: tuple[int, ...] = ()

    def length(self, prompt: int, seed: int) -> int:
        """Tokens of the response to a prompt with this seed."""
        if not self.lengths:
            return length_of(prompt, seed, self.median)
        return self.lengths[random.Random(f"{prompt}/{seed}").randrange(len(self.lengths))]

    def event_s(self, running: int) -> float:
        """Seconds of one event where so many requests run."""
        return self.chunk / self.speed + self.chunk * self.crowd_s * running


def number_of(root: str) -> int:
    """The part of a root digest that tokens depend on."""
    return int(root[:16], 16)


def next_tokens(before: int, seed: int, at: int, root: int, count: int) -> list[int]:
    """`count` tokens that follow the token `before`, the first at absolute position `at`."""
    made: list[int] = []
    for place in range(at, at + count):
        mixed = (before * 6364136223846793005 + seed + place * 1442695040888963407 + root) & MASK
        before = (((mixed ^ mixed >> 31) * 0xBF58476D1CE4E5B9) & MASK) >> 42  # 22 bits
        made.append(before)
    return made


def logprobs_of(ids: Iterable[int]) -> list[float]:
    """Exact in binary: equal tokens have equal log-probs, bit for bit."""
    return [LOGPROBS[token & 1023] for token in ids]


def tokens(
    prompt: Sequence[int], seed: int, spans: Iterable[tuple[int, int]], already: Sequence[int] = ()
) -> list[int]:
    """The response whose runs of `spans` (tokens, number of the root) follow `prompt` and `already`."""
    made = list(already)
    for count, root in spans:
        before = made[-1] if made else prompt[-1]
        made += next_tokens(before, seed, len(prompt) + len(made), root, count)
    return made


def weights(root_seed: bytes) -> list[HostTensor]:
    """The tensors of a state of the virtual trainer: one, that holds 16 bytes of its history."""
    return [HostTensor("w", "U8", (16,), np.frombuffer(root_seed[:16].ljust(16, b"\0"), np.uint8))]


def root_after(state: bytes) -> str:
    """The root digest of that state, as the weight plane computes it."""
    return root_of(weights(state))
