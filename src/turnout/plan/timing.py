"""What a step takes under each schedule, from the times of its parts. Pure.

sync adds them up; pipelined has the longer of rollout and of training with its update; async has what its slower
half takes, or what the lag bound lets its longest response take: an estimate, which `turnout.plan.virtual`
replaces by the production's control plane in virtual time. Promises: no part that gets shorter makes a step longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from turnout.plan.batching import EnginePace, batch_seconds, drawn
from turnout.plan.layouts import Work
from turnout.plan.rates import Update


@dataclass(frozen=True)
class Parts:
    """Of one candidate. `swap_s`: what taking turns on the memory costs a step, `sharing` as Layout.sharing."""

    work: Work
    engines: int
    pace: EnginePace
    train_s: float
    update: Update
    sharing: float = 1.0
    swap_s: float = 0.0
    rest_s: float = 0.0

    @property
    def rollout_s(self) -> float:
        """Of a step's responses alone, from the first request to the last reward."""
        return _rollout_s(self.work, self.engines, self.pace)

    def generation_s(self, lead: float) -> float:
        """What engines that never wait take for a step's responses, with room for `lead` steps in flight."""
        inside = max(1.0, lead * self.work.responses / self.engines)
        running = min(float(self.pace.lanes), inside)
        return self.work.responses * self.pace.response_s(self.work.mean, running) / self.engines


@lru_cache(256)
def _rollout_s(work: Work, engines: int, pace: EnginePace) -> float:
    return batch_seconds(drawn(work.lengths, work.responses), engines, pace)


@dataclass(frozen=True)
class Span:
    """One bar of the timeline, in seconds."""

    lane: str
    what: str
    begin: float
    end: float


@dataclass(frozen=True)
class Prediction:
    """`lag`: the largest of a trained group, `mean_lag` of groups. `trainer` and `engines`: share of the time in
    which each half computes; what is left is its bubble. `simulated`: by the control plane in virtual time."""

    step_s: float
    lag: int
    mean_lag: float
    trainer: float
    engines: float
    spans: tuple[Span, ...]
    simulated: bool = False


def together(one: float, other: float, sharing: float) -> float:
    """Two halves that begin at once and slow each other down by `sharing` while both go on."""
    short, long = sorted((one, other))
    return short * sharing + long - short


def predict(parts: Parts, schedule: str, lead: int) -> Prediction:
    """One step as it repeats; see the module."""
    rollout, train, update = parts.rollout_s, parts.train_s, parts.update
    if schedule == "sync":
        return _sync(parts, rollout)
    busy = train + update.publish_s + update.prepare_s
    if schedule == "pipelined":
        step = together(rollout, busy, parts.sharing) + update.activate_s + parts.rest_s
        rest = step - update.activate_s
        stretch = parts.sharing if parts.sharing > 1 else 1.0
        spans = (
            Span("engines", "rollout", 0.0, min(rest, rollout * stretch)),
            Span("trainer", "train", 0.0, min(rest, train * stretch)),
            Span("update", "update", min(rest, train * stretch), step),
        )
        return Prediction(step, 1, 1.0, train / step, rollout / step, spans)
    generation = parts.generation_s(lead + 0.5)
    lanes = min(float(parts.pace.lanes), (lead + 0.5) * parts.work.responses / parts.engines)
    longest = max(parts.work.lengths) * parts.pace.step_s(max(1.0, lanes))
    bound = longest / (lead + 1)
    step = max(together(generation, train + update.publish_s, parts.sharing), bound) + update.activate_s
    if lead < 2:  # its window of half a step costs half a step's slots: no better than pipelined
        step = max(step, together(rollout, train + update.publish_s, parts.sharing) + update.activate_s)
    spans = (Span("engines", "rollout", 0.0, step), Span("trainer", "train", 0.0, train))
    mean = min(float(lead), 1.0 + longest / step / 2)
    return Prediction(step, lead, mean, train / step, min(1.0, generation / step), spans)


def _sync(parts: Parts, rollout: float) -> Prediction:
    train, update = parts.train_s, parts.update
    marks = [0.0]
    for seconds in (rollout, parts.swap_s + train, update.seconds + parts.rest_s):
        marks.append(marks[-1] + seconds)
    spans = (
        Span("engines", "rollout", marks[0], marks[1]),
        Span("trainer", "train", marks[1], marks[2]),
        Span("update", "update", marks[2], marks[3]),
    )
    step = marks[3]
    return Prediction(step, 0, 0.0, train / step, rollout / step, spans)
