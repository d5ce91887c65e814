"""How long engines take for a batch of responses with continuous batching. Pure.

A decode step of an engine gives each of its running requests one token and takes `base_s` + `request_s` x running.
So all that run get on alike, and when which request starts and ends is told in steps, whatever a step takes: a
batch's time only grows with `base_s`, `request_s` and `prefill_s`. (Exact for requests that are all there at the
start; those that come later are the simulator's.)
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class EnginePace:
    """Seconds of a decode step, of each running request in it, and of a prompt; requests that run at once."""

    base_s: float
    request_s: float
    prefill_s: float
    lanes: int

    def step_s(self, running: float) -> float:
        return self.base_s + self.request_s * running

    def response_s(self, mean: float, running: float) -> float:
        """Of an engine's time that one response costs, among so many."""
        return mean * self.step_s(running) / running + self.prefill_s

    def slower(self, factor: float) -> EnginePace:
        return EnginePace(self.base_s * factor, self.request_s * factor, self.prefill_s * factor, self.lanes)


def drawn(lengths: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """`count` lengths of this distribution, evenly over its quantiles, in an order of the seed."""
    ordered = sorted(lengths)
    picked = [ordered[int((at + 0.5) / count * len(ordered))] for at in range(count)]
    random.Random(seed).shuffle(picked)
    return picked


def engine_seconds(lengths: Sequence[int], pace: EnginePace) -> tuple[float, float]:
    """(seconds until all are done, seconds in which a request ran at all, weighed by lanes in use)."""
    waiting = list(reversed(lengths))
    ends: list[int] = []
    at, seconds, used = 0, 0.0, 0.0
    while waiting or ends:
        while waiting and len(ends) < pace.lanes:
            heapq.heappush(ends, at + waiting.pop())
            seconds += pace.prefill_s
        end = heapq.heappop(ends)
        running = len(ends) + 1
        passed = (end - at) * pace.step_s(running)
        seconds, used, at = seconds + passed, used + passed * running, end
    return seconds, used / max(1, pace.lanes)


def batch_seconds(lengths: Sequence[int], engines: int, pace: EnginePace) -> float:
    """Until the last engine is done; responses are dealt out in turn."""
    return max(engine_seconds(lengths[at::engines], pace)[0] for at in range(min(engines, len(lengths))))
