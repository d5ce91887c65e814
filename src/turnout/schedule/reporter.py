"""What a run tells of itself while it goes: one metrics row and one StepTrained event per step, the panel.

Owns the curves that the panel and the summary show. Keys that begin with `seconds/` are timings, those with
`cache/` depend on who was where at what time; every other number is the same in two deterministic runs of the same
seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from turnout.core.events import StepTrained, VersionPublished
from turnout.core.ports import Clock, EventSink
from turnout.core.types import Finish
from turnout.core.version import WeightVersion
from turnout.observe.metrics import (
    BUBBLE_S,
    EVAL_SCORE,
    LAG,
    LAG_MAX,
    LENGTHS,
    MEMORY,
    MISMATCH,
    PHASES,
    RESPONSE_LEN,
    REWARD,
    SECONDS,
    STEP_S,
    MetricsLog,
    Row,
)
from turnout.observe.panel import Panel
from turnout.observe.run_view import EngineView, RunView, VersionView
from turnout.observe.summary import mean_lag
from turnout.observe.timeline import WORK
from turnout.schedule.loop import StepBatch
from turnout.schedule.phases import Phases

RECENT_STEPS = 5
CACHE_HIT = "cache/later_turns_hit"


@dataclass(frozen=True)
class Sources:
    """What the reporter asks when it draws: engines with their versions, (step, score) of the first evaluation set,
    the metrics of all points in the order made, the version that was published last, and of turns after a sample's
    first the prompt tokens so far and how many of them a prefix cache had; what RunView calls buffer."""

    engines: Callable[[], tuple[EngineView, ...]]
    evals: Callable[[], tuple[tuple[int, float], ...]]
    eval_rows: Callable[[], Sequence[tuple[int, dict[str, float]]]] = lambda: ()
    published: Callable[[], VersionPublished | None] = lambda: None
    later_turns: Callable[[], tuple[int, int]] = lambda: (0, 0)
    run_dir: str = ""
    buffer: Callable[[], tuple[int, int, int] | None] = lambda: None


@dataclass
class Curves:
    """Numbers of every step so far."""

    rewards: list[float] = field(default_factory=list)
    mismatch: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    later_turns: tuple[int, int] = (0, 0)

    @property
    def cache_hit(self) -> float | None:
        """Share of the prompt tokens of later turns that a prefix cache had; None without such turns."""
        return share(*self.later_turns)


class RunReporter:
    """The loop's reporter."""

    def __init__(
        self, events: EventSink, metrics: MetricsLog, panel: Panel, phases: Phases, clock: Clock
    ) -> None:
        self._events, self._metrics, self._panel, self._phases, self._clock = (
            events,
            metrics,
            panel,
            phases,
            clock,
        )
        self.curves = Curves()
        self._sources = Sources(lambda: (), lambda: ())
        self._started, self._step_started = clock.now(), clock.now()
        self._view = RunView("")
        self._told_evals = 0
        self.trains = True  # else the run only samples
        self.waits: Callable[[], tuple[str, bool]] = lambda: (
            "",
            False,
        )  # the line, and whether it is a stall

    def open(self, run_name: str, steps: int | None, sources: Sources) -> None:
        """Begins to draw; the clock of the first step starts with `step_begins`."""
        self._sources = sources
        done, run_dir = len(self.curves.rewards), sources.run_dir
        self._view = RunView(run_name, step=done, steps=steps, run_dir=run_dir)
        self.tick()

    def restore(
        self, rows: Sequence[tuple[int, Row]], points: Sequence[tuple[int, dict[str, float]]]
    ) -> None:
        """Before `open`, in a run that goes on: the metrics and the evaluation points so far. A point
        whose row the end of an earlier incarnation took is written now."""
        for _, row in rows:
            if REWARD in row:
                self.curves.rewards.append(_number(row, REWARD))
                self.curves.mismatch.append(_number(row, MISMATCH))
                self.curves.seconds.append(_number(row, STEP_S))
        for step, point in points:
            if not any(step == at and point.keys() <= row.keys() for at, row in rows):
                self._metrics.write(step, point)
        self._told_evals = len(points)

    def step_begins(self) -> None:
        self._phases.take()
        self._step_started = self._clock.now()

    def step(self, batch: StepBatch, metrics: dict[str, float], version: WeightVersion) -> None:
        """Called once a step, after its version was committed."""
        self._tell_evals()
        seconds = self._phases.take()
        now = self._clock.now()
        total, self._step_started = now - self._step_started - seconds.get("evaluate", 0.0), now
        row = step_row(batch, version) | (train_row(metrics) if self.trains else {})
        published = self._sources.published()
        if published is not None:
            row |= {"weights/bytes": published.bytes, "weights/density": published.density}
        row |= {SECONDS + name: value for name, value in seconds.items()} | {STEP_S: total}
        row[BUBBLE_S] = max(0.0, total - sum(seconds.get(name, 0.0) for name in WORK))
        before, self.curves.later_turns = self.curves.later_turns, self._sources.later_turns()
        hit = share(*(now - then for now, then in zip(self.curves.later_turns, before)))
        row |= {} if hit is None else {CACHE_HIT: hit}
        if self.trains:
            numbers = int(metrics["tokens"]), int(metrics["optimizer_steps"])
            lags = [[lag, tokens] for lag, tokens in sorted(batch.lags.items())]
            self._events.emit(StepTrained(batch.step, len(batch.groups), *numbers, lags, batch.masked))
        self._metrics.write(batch.step + 1, row)
        self.curves.rewards.append(row[REWARD])
        if self.trains:
            self.curves.mismatch.append(row[MISMATCH])
        self.curves.seconds.append(total)
        recent = self.curves.seconds[-RECENT_STEPS:]
        self._view = RunView(
            run_name=self._view.run_name,
            run_dir=self._view.run_dir,
            step=batch.step + 1,
            steps=self._view.steps,
            version=version.label,
            tokens_per_second=row["tokens/response"] / total if total > 0 else None,
            response_len=row[RESPONSE_LEN],
            mismatch=row.get(MISMATCH),
            lag=(row[LAG], max(batch.lags)) if batch.lags else None,
            phase_seconds=tuple((name, seconds.get(name, 0.0)) for name in PHASES),
            seconds_per_step=sum(recent) / len(recent),
            published=None
            if published is None
            else VersionView(published.bytes, published.density, published.encoding),
        )
        self.tick()
        if batch.short:
            self.say(f"step {batch.step + 1}: {len(batch.groups)} groups only: {batch.short}")

    def tick(self) -> None:
        """Draws what is known now; also called once at the end of a run."""
        evals, (waits, stalled) = self._tell_evals(), self.waits()
        self._panel.update(
            RunView(
                **{
                    **self._view.__dict__,
                    "phase": self._phases.current,
                    "rewards": tuple(self.curves.rewards),
                    "evals": evals,
                    "engines": self._sources.engines(),
                    "waits": waits,
                    "stalled": stalled,
                    "buffer": self._sources.buffer(),
                    "seconds_elapsed": self._clock.now() - self._started,
                }
            )
        )

    def _tell_evals(self) -> tuple[tuple[int, float], ...]:
        """Writes the points that are new, whenever a tick comes: in sync each before the row of the next step."""
        rows = self._sources.eval_rows()
        for step, row in rows[self._told_evals :]:
            self._metrics.write(step, row)
            if EVAL_SCORE in row and not self._panel.live:
                self.say(f"step {step}: evaluation {row[EVAL_SCORE]:.3f}")
        self._told_evals = len(rows)
        return self._sources.evals()

    def say(self, text: str) -> None:
        self._panel.say(text)


def share(whole: int, part: int) -> float | None:
    return part / whole if whole else None


def _number(row: Row, key: str) -> float:
    value = row.get(key)
    return math.nan if value is None else value


def step_row(batch: StepBatch, version: WeightVersion) -> dict[str, float]:
    """What the metrics row of a step tells of its batch."""
    members = [t for group in batch.groups for t in group.trajectories]
    lengths = [len(t.response_ids) - t.opening for t in members]
    by_group = [group.rewards for group in batch.groups]
    rewards = [reward for found in by_group for reward in found]
    return {
        REWARD: sum(rewards) / len(rewards),
        **dict(zip(LENGTHS, (min(lengths), sum(lengths) / len(lengths), max(lengths)))),
        "rollout/truncated_share": sum(t.finish is Finish.LENGTH for t in members) / len(members),
        "rollout/groups": len(batch.groups),
        "rollout/groups_of_equal_reward": sum(max(found) == min(found) for found in by_group),
        "rollout/groups_failed": batch.failed,
        "rollout/groups_filtered": batch.filtered,
        "rollout/groups_evicted": batch.evicted,
        "rollout/masked_tokens": batch.masked,
        LAG: mean_lag(batch.lags) or 0.0,
        LAG_MAX: max(batch.lags, default=0),
        "tokens/response": sum(lengths),
        "tokens/prompt": sum(len(group.prompt.token_ids) for group in batch.groups),
        "weight_version": version.counter,
    }


def train_row(metrics: dict[str, float]) -> dict[str, float]:
    """What it tells of the train step: the trainer's numbers under train/, its timings under seconds/."""
    row = {"optimizer_steps": metrics["optimizer_steps"], MISMATCH: metrics["mismatch_mean"]}
    for name, value in metrics.items():
        if name.startswith("seconds_"):
            row[f"{SECONDS}train_{name.removeprefix('seconds_')}"] = value
        elif name in ("released_bytes", "offloaded_bytes"):
            row[MEMORY + name] = value
        elif name not in ("step", "optimizer_steps", "mismatch_mean"):
            row[f"train/{name}"] = value
    return row
