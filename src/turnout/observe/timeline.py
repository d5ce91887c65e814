"""A run as spans of time on lanes, from its events. Pure.

    trainer     train, publish, checkpoint; idle in between, with what it waited for
    update      publish, prepare, drain, activate: one version's way to the engines
    evaluate    points that rollouts waited for
    ENGINE      rollout while it had requests; prepare and activate of a version, which overlap it; fenced (no
                request goes to it), released (its memory is the trainer's); idle where its life has none of these

Promises: a span lies within one incarnation; spans of a lane come in the order in which they begin; on `trainer`
and `update` they don't overlap. An engine that is asked through a router works on the router's lane. What had not
ended when the log did is not told.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from turnout.core.events import (
    EngineFenced,
    EngineLost,
    EngineReady,
    EngineRemoved,
    EngineWorked,
    Event,
    GroupCompleted,
    GroupCut,
    GroupDropped,
    GroupRequeued,
    GroupResumed,
    GroupTaken,
    GroupTrained,
    MemoryReleased,
    PhaseEnded,
    RouterLost,
    RouterReady,
    RunStarted,
    StepTrained,
    VersionAborted,
    VersionAttested,
    VersionCommitted,
    VersionPrepared,
    VersionPublished,
)
from turnout.core.waits import UPDATE as UPDATES

TRAINER, UPDATE, EVALUATE = "trainer", "update", "evaluate"
IDLE = "idle"
WORK = frozenset({"train", "publish", "checkpoint"})  # phases in which the trainer has something to do
MAYBE = frozenset({"evaluate", "drain"})  # gone through in any case
ON_UPDATE = frozenset({"publish", "prepare", "activate", "drain"})
LEAST_S = 1e-3  # shorter gaps are none, nor is a phase that there was nothing to do in
Timed = tuple[float, Event]


@dataclass(frozen=True)
class Span:
    """`start` and `end` are wall seconds. `args` says more: `step`, `version`, `bytes`, `reason`, `waits_for`."""

    lane: str
    name: str
    start: float
    end: float
    args: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Count:
    """The value of a counter from `at` on: `groups in flight`, `buffer` (completed, not trained), `slots`, `lag`
    (mean of a step's tokens)."""

    name: str
    at: float
    value: float


def spans(events: Iterable[Timed]) -> list[Span]:
    """All spans, by lane and start; `events` as turnout.observe.eventlog.read_events yields them."""
    found: list[Span] = []
    for life in _lives(events):
        phases = _phases(life)
        found += _apart([span for span in phases if span.lane == UPDATE])
        found += [span for span in phases if span.lane == EVALUATE]
        found += _apart(_trainer(life, phases))
        found += _engines(life, [span for span in phases if span.lane == UPDATE and span.name == "activate"])
    return sorted(found, key=lambda span: (span.lane, span.start, span.end))


def _lives(events: Iterable[Timed]) -> Iterator[list[Timed]]:
    """The events of each incarnation, up to the next one."""
    life: list[Timed] = []
    for at, event in events:
        if isinstance(event, RunStarted) and life:
            yield life
            life = []
        life.append((at, event))
    if life:
        yield life


def _apart(spans: Iterable[Span]) -> Iterator[Span]:
    """In the order in which they begin, without the moment that telling one's end took."""
    end = 0.0
    for span in spans:
        yield span if span.start >= end else replace(span, start=min(end, span.end))
        end = max(end, span.end)


def _phases(life: Sequence[Timed]) -> list[Span]:
    """Phases on their lanes, with their step or version. Of TRAINER those that it waits through too."""
    found: list[Span] = []
    train: int | None = None  # where the newest train phase is, until its step is told
    version: dict[str, Any] = {}
    for at, event in life:
        if isinstance(event, PhaseEnded):
            name, start = event.phase, at - event.seconds
            if name in MAYBE and event.seconds < LEAST_S:
                continue
            if name in ON_UPDATE:
                found.append(Span(UPDATE, name, start, at, version))
            if name == EVALUATE:
                found.append(Span(EVALUATE, name, start, at))
            if event.who != UPDATES:
                found.append(Span(TRAINER, name, start, at, version if name in ON_UPDATE else {}))
                train = len(found) - 1 if name == "train" else train
        elif isinstance(event, StepTrained) and train is not None:
            args = {"step": event.step, "groups": event.groups, "tokens": event.tokens}
            found[train], train = replace(found[train], args=args), None
        elif isinstance(event, VersionPublished):
            version = {"version": event.version, "bytes": event.bytes, "density": event.density}
        elif isinstance(event, VersionAborted):
            version = {**version, "aborted": event.reason}
    return found


def _trainer(life: Sequence[Timed], phases: Sequence[Span]) -> Iterator[Span]:
    """What it did, and idle between, each with the phase that it waited through longest."""
    own = sorted((span for span in phases if span.lane == TRAINER), key=lambda span: span.start)
    if not own:
        return
    busy = [span for span in own if span.name in WORK]
    waits = [span for span in own if span.name not in WORK]
    at, first = own[0].start, 0
    for span in [*busy, Span(TRAINER, IDLE, life[-1][0], life[-1][0])]:
        while first < len(waits) and waits[first].end <= at:
            first += 1
        if span.start - at > LEAST_S:
            upto = bisect_right(waits, span.start, lo=first, key=lambda wait: wait.start)
            through = [(min(w.end, span.start) - max(w.start, at), w.name) for w in waits[first:upto]]
            most = max((pair for pair in through if pair[0] > 0), default=(0.0, ""))[1]
            yield Span(TRAINER, IDLE, at, span.start, {"waits_for": most} if most else {})
        if span.name != IDLE:
            yield span
        at = max(at, span.end)


@dataclass
class _Engine:
    """One engine within one incarnation, as far as its events are read."""

    name: str
    began: float | None = None  # of its present life
    fenced: tuple[float, str] | None = None
    released: float | None = None
    made: list[Span] = field(default_factory=list[Span])

    def take(self, at: float, event: Event) -> None:
        if isinstance(event, EngineReady | RouterReady):
            self.began = at
        elif isinstance(event, EngineWorked):
            self._worked(at - event.seconds, at, event.requests)
        elif isinstance(event, EngineFenced) and self.fenced is None:
            self.fenced = at, event.reason
        elif isinstance(event, MemoryReleased):
            self.released = at
        elif isinstance(event, VersionAttested):
            self._serves(at)
        elif isinstance(event, EngineLost | EngineRemoved | RouterLost):
            self.ends(at)

    def ends(self, at: float) -> None:
        """Its life is over: what is left of it was idle."""
        self._serves(at)
        if self.began is not None:
            self.made += _gaps(self.name, self.began, at, self.made)
        self.began = None

    def add(self, name: str, start: float, end: float, args: dict[str, Any]) -> None:
        self.made.append(Span(self.name, name, start, end, args))

    def _serves(self, at: float) -> None:
        """It takes requests again, or is gone."""
        if self.fenced is not None:
            self.add("fenced", self.fenced[0], at, {"reason": self.fenced[1]})
        if self.released is not None:
            self.add("released", self.released, at, {})
        self.fenced = self.released = None

    def _worked(self, start: float, end: float, requests: int) -> None:
        """Parts of work without a break are one span."""
        place = next((at for at in range(len(self.made) - 1, -1, -1) if self.made[at].name == "rollout"), -1)
        if place >= 0 and start - self.made[place].end <= LEAST_S:
            args = {"requests": self.made[place].args["requests"] + requests}
            self.made[place] = replace(self.made[place], end=end, args=args)
        else:
            self.add("rollout", start, end, {"requests": requests})


def _gaps(lane: str, start: float, end: float, spans: Sequence[Span]) -> list[Span]:
    gaps: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        if span.start - start > LEAST_S and span.start < end:
            gaps.append(Span(lane, IDLE, start, span.start))
        start = max(start, span.end)
    return [*gaps, Span(lane, IDLE, start, end)] if end - start > LEAST_S else gaps


def _engines(life: Sequence[Timed], activations: Sequence[Span]) -> Iterator[Span]:
    engines: dict[str, _Engine] = {}
    published: dict[str, float] = {}
    starts = [span.start for span in activations]
    for at, event in life:
        if isinstance(event, VersionPublished):
            published[event.version] = at
        if (name := _name(event)) is None:
            continue
        engine = engines.setdefault(name, _Engine(name))
        engine.take(at, event)
        if isinstance(event, VersionPrepared):
            engine.add("prepare", published.get(event.version, at), at, {"version": event.version})
        elif isinstance(event, VersionAttested):
            place = bisect_right(starts, at) - 1
            if place >= 0 and at <= activations[place].end:
                engine.add("activate", starts[place], at, {"version": event.version})
    for engine in engines.values():
        engine.ends(life[-1][0])
        yield from engine.made


def _name(event: Event) -> str | None:
    """The engine or router that an event is about."""
    if isinstance(event, MemoryReleased):
        return event.who if event.who != TRAINER else None
    return getattr(event, "engine", None) or getattr(event, "router", None)


@dataclass
class Groups:
    """Where the groups are; a trained one keeps its slot until the version that was made from it is committed.
    `resumes`: incarnations follow, which undo what was trained; else no trained group is kept after its commit."""

    resumes: bool = True
    flying: set[str] = field(default_factory=set[str])
    cut: set[str] = field(default_factory=set[str])
    done: set[str] = field(default_factory=set[str])
    waiting: dict[str, int] = field(default_factory=dict[str, int])  # trained by step, with their slot
    trained: dict[str, int] = field(default_factory=dict[str, int])
    steps: dict[str, int] = field(default_factory=dict[str, int])  # by version

    @property
    def numbers(self) -> dict[str, int]:
        slots = sum(map(len, (self.flying, self.cut, self.done, self.waiting)))
        return {"groups in flight": len(self.flying), "buffer": len(self.done), "slots": slots}

    def begins(self, resumed_at: int) -> None:
        """An incarnation goes on from so many steps: what was trained later is complete again."""
        self.cut |= self.flying
        self.flying = set()
        undone = {group for group, step in self.trained.items() if step >= resumed_at}
        for group in undone:
            self._leaves(group)
            self.done.add(group)

    def take(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.begins(event.resumed_at or 0)
        elif isinstance(event, VersionPublished):
            self.steps[event.version] = event.step
        elif isinstance(event, VersionCommitted):
            made = self.steps.get(event.version, 0)
            self.waiting = {group: step for group, step in self.waiting.items() if step >= made}
            self.steps = {version: step for version, step in self.steps.items() if step >= made}
        elif isinstance(event, GROUP_EVENTS):
            self._leaves(event.group)
            if isinstance(event, GroupTaken | GroupResumed):
                self.flying.add(event.group)
            elif isinstance(event, GroupCut):
                self.cut.add(event.group)
            elif isinstance(event, GroupCompleted):
                self.done.add(event.group)
            elif isinstance(event, GroupTrained):
                self.waiting[event.group] = event.step
                if self.resumes:
                    self.trained[event.group] = event.step

    def _leaves(self, group: str) -> None:
        for places in (self.flying, self.cut, self.done):
            places.discard(group)
        for table in (self.waiting, self.trained):
            table.pop(group, None)


GROUP_EVENTS = (
    GroupTaken, GroupResumed, GroupCut, GroupCompleted, GroupTrained, GroupDropped, GroupRequeued,
)  # fmt: skip


def counts(events: Iterable[Timed]) -> Iterator[Count]:
    """Every change of every counter, in order; of changes at one instant the last."""
    groups = Groups()
    told: dict[str, int] = {}
    for at, together in groupby(events, key=lambda timed: timed[0]):
        for _, event in together:
            groups.take(event)
            if isinstance(event, StepTrained) and event.lags:
                total = sum(tokens for _, tokens in event.lags)
                yield Count("lag", at, sum(lag * tokens for lag, tokens in event.lags) / total)
        numbers = groups.numbers
        for name, value in numbers.items():
            if told.get(name) != value:
                yield Count(name, at, value)
        told = numbers
