"""How many groups may be in flight, by what the engines report: additive increase, multiplicative decrease.
Pure.

Slots (turnout.core.slots) say how many groups may exist; this says how many of them may run. Promises: never
more than `most`, never fewer than `least`; the limit falls only upon a report of pressure and rises only while
it is what holds work back; without a report of any engine nothing starts (the network is split, or the engines
are gone), and work goes on by itself once one answers. Under pressure a group that is predicted to be too old
when it trains doesn't start: it would take memory from groups that will be trained.

Pressure is a KV cache used above `kv_high`, where engines begin to retract requests and compute them again, or a
queue longer than what runs. Full batches with a short queue are no pressure: that is what engines are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DECREASE = 0.75
STEPS_TO_MOST = 16  # reports without pressure that take the limit from nothing to `most`


@dataclass(frozen=True)
class EngineLoad:
    """One engine's report: requests that run and wait, the share of its KV cache in use (0 to 1)."""

    running: int
    waiting: int
    kv_usage: float


@dataclass(frozen=True)
class AdmissionPlan:
    """`most` and `least` groups in flight; `max_staleness` and `per_step` as in docs/staleness.md."""

    most: int
    per_step: int
    max_staleness: int
    kv_high: float = 0.9
    least: int = 1


class Admission:
    """`limit` is how many groups may be in flight now."""

    def __init__(self, plan: AdmissionPlan) -> None:
        self._plan = plan
        self.limit = plan.most
        self.pressed = False
        self._reachable = True

    def report(self, loads: Sequence[EngineLoad], in_flight: int) -> int:
        """Takes the reports of the engines that answered. Returns how many groups are to be cut, newest first, so
        that the older ones have the memory: 0 unless there is pressure."""
        plan = self._plan
        self._reachable = bool(loads)
        if not loads:
            return 0
        full = any(load.kv_usage > plan.kv_high for load in loads)
        self.pressed = full or any(load.waiting > load.running for load in loads)
        if self.pressed:
            self.limit = max(plan.least, int(min(self.limit, in_flight) * DECREASE))
        elif in_flight >= self.limit:
            self.limit = min(plan.most, self.limit + max(1, plan.most // STEPS_TO_MOST))
        return max(0, in_flight - self.limit) if full else 0

    def may_start(self, in_flight: int, ahead: int) -> bool:
        """Whether one more group may start; `ahead` are the slots that are taken before its own."""
        if not self._reachable or in_flight >= self.limit:
            return False
        return not self.pressed or predicted_lag(ahead, self._plan.per_step) <= self._plan.max_staleness


def predicted_lag(ahead: int, per_step: int) -> int:
    """The lag of a group that starts now, if groups train in order: the steps that are made of what is ahead of it
    and are not part of the version that it starts on."""
    return ahead // per_step
