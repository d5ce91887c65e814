"""A run as the dashboard shows it: a fold over its events and its rows of metrics, in bounded memory.

What grows with the run is binned by step (StepBins) or cut to the newest (FleetPicture); what is under way is kept
by group. Promises: a step that a resume undid counts once, as it was trained last (turnout.observe.audit_log says
the same of a whole log); an event of a kind that this program doesn't know is counted, and no fault.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from turnout.core.events import (
    EvalDone,
    Event,
    GroupCompleted,
    GroupDropped,
    GroupRequeued,
    GroupTaken,
    GroupTrained,
    RunEnded,
    RunStarted,
    StepTrained,
    VersionCommitted,
)
from turnout.observe.fleet_picture import FleetPicture
from turnout.observe.step_bins import StepBins, length_bucket
from turnout.observe.summary import wilson_interval

SLOWEST, EVALS, CAUSES = 200, 4000, 200
OTHER = "other causes"
UNDER_WAY, BUFFERED, SLOTS, TRAINED_TOKENS = (
    "groups/under_way",
    "groups/buffered",
    "groups/slots",
    "tokens/trained",
)
EVICTED, MASKED = "groups/dropped", "tokens/masked"


@dataclass
class OpenGroup:
    """Taken and not ended; `lengths` are there once it is complete."""

    taken: float
    lengths: list[int] = field(default_factory=list[int])
    completed: float | None = None


class RunPicture:
    """See the module. `undone` are pairs of (place in the log, step): what was trained at that step or later, and
    told before that place, does not count."""

    def __init__(self, undone: tuple[tuple[int, int], ...] = ()) -> None:
        self.bins, self.fleet = StepBins(), FleetPicture()
        self.run: dict[str, Any] = {}
        self.status, self.reason = "", ""
        self.incarnations: list[tuple[float, int, int | None]] = []
        self.step: int | None = None
        self.evals: list[dict[str, Any]] = []
        self.open: dict[str, OpenGroup] = {}
        self.buffered, self.slots = 0, 0
        self._held: Counter[int] = Counter()  # trained groups that keep their slot, by step
        self.counts: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self.slowest: list[tuple[float, str, int, float]] = []
        self.revision = 0
        self._undone = undone
        self.started: float | None = None
        self.last: float | None = None

    def fold(self, place: int, at: float, event: Event) -> None:
        """One event, in the order of the log; `place` is where its line begins."""
        self.last = at
        match event:
            case GroupTaken():
                self._taken(at, event.group)
            case GroupCompleted():
                self._completed(at, event)
            case GroupTrained() | StepTrained() | EvalDone():
                if not self._is_undone(place, event):
                    self._counted(at, event)
            case GroupDropped() | GroupRequeued():
                self._left(event)
            case RunStarted():
                self._begun(at, event)
            case RunEnded():
                self.status, self.reason = event.status, event.reason
            case VersionCommitted():
                self._committed(event.version)
            case _:
                pass
        self.fleet.revision = self.revision
        self.fleet.fold(at, event)

    def row(self, step: int, values: Mapping[str, float | None]) -> None:
        """One row of metrics; `step` counts train steps done."""
        bin_ = self.bins.at(max(0, step - 1), self.revision)
        for key, value in values.items():
            if value is not None:
                bin_.add(key, value)

    def _is_undone(self, place: int, event: GroupTrained | StepTrained | EvalDone) -> bool:
        done = event.step if isinstance(event, EvalDone) else event.step + 1  # train steps with it
        return any(place < cut and done > behind for cut, behind in self._undone)

    def _counted(self, at: float, event: GroupTrained | StepTrained | EvalDone) -> None:
        if isinstance(event, GroupTrained):
            self._trained(event)
        elif isinstance(event, StepTrained):
            self._step(at, event)
        else:
            self._evaluated(at, event)

    def _begun(self, at: float, event: RunStarted) -> None:
        self.started = at if self.started is None else self.started
        self.run = {
            "run_id": event.run_id,
            "schedule": event.schedule,
            "max_lag": event.max_lag,
            "seed": event.seed,
            "update_interval": event.update_interval,
        }
        self.status, self.reason = "", ""
        self.incarnations = [*self.incarnations[-99:], (at, event.incarnation, event.resumed_at)]
        self.slots, self._held = len(self.open), Counter()
        if event.incarnation:
            told = "from the beginning" if not event.resumed_at else f"after {event.resumed_at} steps"
            self.fleet.fault(at, "run resumed", f"incarnation {event.incarnation}", f"goes on {told}")

    def _taken(self, at: float, group: str) -> None:
        again = self.open.get(group)
        if again is None:
            self.slots += 1
        elif again.completed is not None:
            self.buffered -= 1
        self.open[group] = OpenGroup(at)
        self.counts["taken"] += 1

    def _completed(self, at: float, event: GroupCompleted) -> None:
        one = self.open.setdefault(event.group, OpenGroup(at))
        self.buffered += one.completed is None
        one.completed, one.lengths = at, [lengths[0] for lengths in event.lengths if lengths]
        self.counts["completed"] += 1
        found = (at - one.taken, event.group, sum(one.lengths), at)
        if len(self.slowest) < SLOWEST:
            heapq.heappush(self.slowest, found)
        else:
            heapq.heappushpop(self.slowest, found)

    def _ended(self, group: str) -> OpenGroup | None:
        one = self.open.pop(group, None)
        if one is not None and one.completed is not None:
            self.buffered -= 1
        return one

    def _trained(self, event: GroupTrained) -> None:
        one = self._ended(event.group)
        self._held[event.step] += 1
        self.counts["trained"] += 1
        if one is not None:
            lengths = self.bins.at(event.step, self.revision).lengths
            for tokens in one.lengths:
                lengths[length_bucket(tokens)] += 1

    def _committed(self, version: str) -> None:
        """Groups that it was made from give their slots back."""
        known = self.fleet.versions.get(version)
        made = 0 if known is None or known.step is None else known.step
        for step in [step for step in self._held if step < made]:
            self.slots = max(0, self.slots - self._held.pop(step))

    def _left(self, event: GroupDropped | GroupRequeued) -> None:
        if self._ended(event.group) is not None:
            self.slots = max(0, self.slots - 1)
        self.counts["dropped" if isinstance(event, GroupDropped) else "requeued"] += 1
        cause = event.reason if event.reason in self.causes or len(self.causes) < CAUSES else OTHER
        self.causes[cause] += 1
        step = 0 if self.step is None else self.step + 1
        self.bins.at(step, self.revision).drops[cause] += 1

    def _step(self, at: float, event: StepTrained) -> None:
        self.step = event.step
        bin_ = self.bins.at(event.step, self.revision)
        bin_.at = at
        for lag, tokens in event.lags:
            bin_.lags[lag] += tokens
        bin_.add(TRAINED_TOKENS, event.tokens)
        bin_.add(MASKED, event.masked)
        bin_.add(UNDER_WAY, len(self.open) - self.buffered)
        bin_.add(BUFFERED, self.buffered)
        bin_.add(SLOTS, self.slots)

    def _evaluated(self, at: float, event: EvalDone) -> None:
        share = 0.0 <= event.score <= 1.0 and event.items > 0
        low, high = wilson_interval(event.score * event.items, event.items) if share else (None, None)
        if len(self.evals) >= EVALS:
            self.evals = _thinned(self.evals)
        self.evals.append(
            {
                "name": event.name,
                "step": event.step,
                "at": at,
                "version": event.version,
                "score": event.score,
                "low": low,
                "high": high,
                "items": event.items,
                "failed": event.failed,
            }
        )


def _thinned(evals: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every second one of each name."""
    seen: Counter[str] = Counter()
    kept: list[dict[str, Any]] = []
    for one in evals:
        if not seen[one["name"]] % 2:
            kept.append(one)
        seen[one["name"]] += 1
    return kept[1 - EVALS :]
