"""Which candidates there are, what each gives, and which is best.

A candidate is a layout, a schedule with its lead, and a way of versions. Promises: whatever does not fit is told
with why; the best is that of the shortest step, and of those within `ALIKE` of it the simplest, by the order of
`RANK`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from turnout.plan.cluster import Cluster, Found
from turnout.plan.layouts import Fit, Layout, Work, fit, layouts
from turnout.plan.rates import Measured, Rates, Update, as_measured, rates, updates
from turnout.plan.timing import Parts, Prediction, predict

LEADS = (1, 2, 3, 4)
ALIKE = 1.03
RANK = ("sync", "pipelined", "async")
STAGED = {"disk", "disk delta", "follower"}  # an engine has a second set of weights meanwhile


@dataclass(frozen=True)
class Candidate:
    """`lead` of the schedule in train steps. `prediction` None: it does not fit, `fit.why` says why."""

    layout: Layout
    schedule: str
    lead: int
    fit: Fit
    rates: Rates | None = None
    update: Update | None = None
    parts: Parts | None = None
    prediction: Prediction | None = None

    @property
    def name(self) -> str:
        lead = f" {self.lead}" if self.schedule == "async" else ""
        return f"{self.layout.name}; {self.schedule}{lead}"

    @property
    def step_s(self) -> float:
        return float("inf") if self.prediction is None else self.prediction.step_s

    @property
    def simplicity(self) -> tuple[int, int]:
        return RANK.index(self.schedule), self.lead

    @property
    def changes(self) -> dict[str, Any]:
        """The options that make the schedule."""
        found: dict[str, Any] = {"schedule": self.schedule, "update_weights_interval": 1}
        found |= {"max_lead": None, "rollout_slots": None, "rollout_window": None}
        return found | ({"max_staleness": self.lead} if self.schedule == "async" else {})


def schedules(layout: Layout) -> list[tuple[str, int]]:
    """What a layout allows: halves that take turns can't both compute, distant engines can't be waited for."""
    later = [("async", lead) for lead in LEADS]
    if layout.kind == "time-sliced":
        return [("sync", 0)]
    return later if layout.site else [("sync", 0), ("pipelined", 1), *later]


def parts_of(
    work: Work, layout: Layout, found: Found, known: Measured | None
) -> tuple[Fit, Rates, list[Parts]]:
    """What a layout gives by each way of versions, the quickest first; none where nothing fits."""
    cluster = found.cluster
    speed = rates(work, layout, found, known)
    ways = updates(work, layout, cluster, speed)
    if known is not None:
        ways = as_measured(ways, known)
    made: list[Parts] = []
    room = Fit()
    for way in ways:
        held = fit(work, layout, cluster, way.transport in STAGED)
        room = held if not made else room
        if not held.why:
            made.append(_parts(work, layout, cluster, speed.pace(work, held), (speed, way)))
    return room, speed, made


def _parts(work: Work, layout: Layout, cluster: Cluster, pace: Any, times: tuple[Rates, Update]) -> Parts:
    speed, way = times
    swap = 0.0
    if layout.kind == "time-sliced":  # masters and moments go out and come back
        ranks = 1 if cluster.cores else layout.train
        swap = 2 * 12 * work.shape.params / ranks / (cluster.links.host.gb_per_s * 1e9)
    sharing = layout.sharing(cluster)
    return Parts(work, layout.engines, pace, speed.train_s(work), way, sharing, swap, speed.rest_s.value)


def candidates(work: Work, found: Found, known: Measured | None = None) -> list[Candidate]:
    """All of them, the best first, those that do not fit last."""
    made: list[Candidate] = []
    for layout in layouts(found.cluster):
        room, speed, parts = parts_of(work, layout, found, known)
        for schedule, lead in schedules(layout):
            base = Candidate(layout, schedule, lead, room, speed)
            if not parts:
                made.append(base)
                continue
            tried = [
                replace(base, update=one.update, parts=one, prediction=predict(one, schedule, lead))
                for one in parts
            ]
            made.append(min(tried, key=lambda one: one.step_s))
    return sorted(made, key=lambda one: (one.step_s, one.simplicity))


def best_of(rows: list[Candidate]) -> Candidate | None:
    """See the module; None where nothing fits."""
    fitting = [row for row in rows if row.prediction is not None]
    if not fitting:
        return None
    least = min(row.step_s for row in fitting)
    alike = [row for row in fitting if row.step_s <= least * ALIKE]
    return min(alike, key=lambda row: (row.simplicity, row.step_s))


def confirmed(
    rows: list[Candidate], simulate: Callable[[Candidate], Prediction], most: int = 6
) -> list[Candidate]:
    """Has the simulator say what the best gives, as long as that is an estimate of async. What an estimate was
    wrong by, it is taken to be wrong by for smaller leads of the same layout too."""
    for _ in range(most):
        best = best_of(rows)
        if best is None or best.prediction is None or best.schedule != "async" or best.prediction.simulated:
            break
        said = simulate(best)
        factor = said.step_s / best.step_s
        rows = [_corrected(row, best, said, factor) for row in rows]
    return sorted(rows, key=lambda one: (one.step_s, one.simplicity))


def _corrected(row: Candidate, best: Candidate, said: Prediction, factor: float) -> Candidate:
    if row is best:
        return replace(row, prediction=said)
    alike = row.layout == best.layout and row.schedule == "async" and row.lead < best.lead
    if not alike or row.prediction is None or row.prediction.simulated:
        return row
    return replace(row, prediction=replace(row.prediction, step_s=row.prediction.step_s * factor))


def smallest(work: Work, found: Found) -> str:
    """What would fit where nothing does: the fewest devices of this kind, else the memory that one would need."""
    cluster = found.cluster
    for factor in (2**n for n in range(1, 15)):
        if cluster.cores:
            larger = cluster.model_copy(
                update={
                    "device": cluster.device.model_copy(
                        update={"memory_gb": cluster.device.memory_gb * factor}
                    )
                }
            )
            text = f"{larger.device.memory_gb * larger.devices:.0f} GB of memory"
        else:
            larger = cluster.model_copy(update={"machines": cluster.machines * factor})
            text = f"{larger.devices} devices of {cluster.device.memory_gb:g} GB"
        for layout in layouts(larger):
            if not fit(work, layout, larger, layout.kind == "disaggregated").why:
                return f"the smallest that was found to fit: {text}, {layout.name}"
    return "no number of these devices fits it: a device holds too little for one layer or one sample"
