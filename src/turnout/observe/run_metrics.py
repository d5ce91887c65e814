"""What a run counts, for Prometheus: from its events as they are told, and from the rows of metrics.jsonl.

Names follow prometheus.io/docs/practices/naming: `turnout_`, base units, `_total` for what only grows. Counters
begin anew with each process, as Prometheus expects. The numbers of the last train step are gauges by their names in
metrics.jsonl: `rollout/reward_mean` is turnout_rollout_reward_mean, `seconds/train` turnout_step_train_seconds.
Memory does not grow with time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from turnout.core.events import (
    EngineFenced,
    EngineLost,
    EngineReady,
    EngineRemoved,
    EngineWorked,
    EvalDone,
    Event,
    GroupCompleted,
    GroupCut,
    GroupDropped,
    GroupRequeued,
    GroupResumed,
    GroupTaken,
    GroupTrained,
    PhaseEnded,
    RunStalled,
    RunStarted,
    StepTrained,
    VersionAborted,
    VersionAttested,
    VersionCommitted,
    VersionPublished,
)
from turnout.core.version import label_counter
from turnout.observe.exposition import Exposition, Histogram
from turnout.observe.metrics import MEMORY, SECONDS
from turnout.observe.timeline import Groups

LAG_STEPS = (0, 1, 2, 3, 4, 6, 8, 16)
COUNTERS = {
    "turnout_train_steps_total": "Train steps.",
    "turnout_trained_tokens_total": "Tokens that carried loss.",
    "turnout_masked_tokens_total": "Tokens that --staleness-policy took out of the loss.",
    "turnout_groups_total": "Groups that came to a state.",
    "turnout_phase_seconds_total": "Seconds of a phase, of the run or of the update beside it.",
    "turnout_weight_versions_total": "Weight versions that came to a state.",
    "turnout_weight_published_bytes_total": "Bytes of published weight versions.",
    "turnout_engine_starts_total": "Times that an engine came to serve.",
    "turnout_engine_losses_total": "Times that an engine was lost.",
    "turnout_engine_fences_total": "Times that an engine was fenced.",
    "turnout_engine_busy_seconds_total": "Seconds in which an engine had requests of the run.",
    "turnout_engine_requests_total": "Requests of the run that ended at an engine.",
    "turnout_stalls_total": "Stalls told.",
}
GAUGES = {
    "turnout_run_info": "The run, by its labels.",
    "turnout_groups_in_flight": "Groups that are sampled.",
    "turnout_groups_buffered": "Groups that are complete and not trained.",
    "turnout_slots_taken": "Slots taken by groups.",
    "turnout_weight_version": "Number of the version that was committed last.",
    "turnout_weight_density": "Share of elements in the version that was published last.",
    "turnout_engine_up": "1 while an engine serves.",
    "turnout_engine_weight_version": "Number of the version that an engine attested last.",
    "turnout_eval_score": "Score of the newest evaluation point.",
}
LAG = "turnout_trained_token_lag_steps"
STATES: dict[type[Event], str] = {
    GroupTaken: "taken",
    GroupCompleted: "completed",
    GroupTrained: "trained",
    GroupDropped: "dropped",
    GroupRequeued: "requeued",
    GroupCut: "cut",
    GroupResumed: "resumed",
}
VERSIONS: dict[type[Event], str] = {
    VersionPublished: "published",
    VersionCommitted: "committed",
    VersionAborted: "aborted",
}
Labels = tuple[tuple[str, str], ...]


class RunMetrics:
    """Takes events and rows, gives the text."""

    def __init__(self, run_name: str) -> None:
        self._run_name = run_name
        self._groups = Groups(resumes=False)
        self._lags = Histogram(LAG_STEPS)
        self._values: dict[str, dict[Labels, float]] = {name: {} for name in (*COUNTERS, *GAUGES)}
        self._step: dict[str, float] = {}
        for name in COUNTERS:
            if not any(word in name for word in ("groups", "phase", "versions", "engine")):
                self._add(name, 0)

    def take(self, event: Event) -> None:
        """An event that was told."""
        self._groups.take(event)
        if (state := STATES.get(type(event))) is not None:
            self._add("turnout_groups_total", state=state)
        elif (state := VERSIONS.get(type(event))) is not None:
            self._add("turnout_weight_versions_total", state=state)
            self._version(event)
        elif (engine := getattr(event, "engine", None)) is not None:
            self._engine(event, engine)
        else:
            self._of_run(event)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """A row of metrics, as turnout.observe.metrics has it."""
        del step
        named = {gauge_name(key): value for key, value in values.items() if not key.startswith("eval/")}
        self._step |= {name: value for name, value in named.items() if name not in GAUGES}

    def close(self) -> None:
        """Nothing is held."""

    def text(self) -> str:
        """All of it, as Prometheus reads it."""
        numbers = self._groups.numbers
        self._set("turnout_groups_in_flight", numbers["groups in flight"])
        self._set("turnout_groups_buffered", numbers["buffer"])
        self._set("turnout_slots_taken", numbers["slots"])
        out = Exposition({"run": self._run_name})
        for kind, families in (("counter", COUNTERS), ("gauge", GAUGES)):
            for name, said in families.items():
                out.family(
                    name, kind, said, [(dict(labels), value) for labels, value in self._values[name].items()]
                )
        out.histogram(LAG, "Age of tokens that trained, in train steps.", self._lags)
        for name, value in sorted(self._step.items()):
            out.value(name, "gauge", "Of the last train step (metrics.jsonl).", value)
        return out.text()

    def _add(self, name: str, amount: float = 1, /, **labels: str) -> None:
        key = tuple(labels.items())
        self._values[name][key] = self._values[name].get(key, 0) + amount

    def _set(self, name: str, value: float, /, **labels: str) -> None:
        self._values[name][tuple(labels.items())] = value

    def _version(self, event: Event) -> None:
        if isinstance(event, VersionPublished):
            self._add("turnout_weight_published_bytes_total", event.bytes)
            self._set("turnout_weight_density", event.density)
        elif isinstance(event, VersionCommitted):
            self._set("turnout_weight_version", label_counter(event.version) or 0)

    def _engine(self, event: Event, engine: str) -> None:
        if isinstance(event, EngineReady):
            self._add("turnout_engine_starts_total", engine=engine)
            self._set("turnout_engine_up", 1, engine=engine)
        elif isinstance(event, EngineLost):
            self._add("turnout_engine_losses_total", engine=engine)
            self._set("turnout_engine_up", 0, engine=engine)
        elif isinstance(event, EngineRemoved):
            for name in ("turnout_engine_up", "turnout_engine_weight_version"):
                self._values[name].pop((("engine", engine),), None)
        elif isinstance(event, EngineFenced):
            self._add("turnout_engine_fences_total", engine=engine)
        elif isinstance(event, EngineWorked):
            self._add("turnout_engine_busy_seconds_total", event.seconds, engine=engine)
            self._add("turnout_engine_requests_total", event.requests, engine=engine)
        elif isinstance(event, VersionAttested):
            self._set("turnout_engine_weight_version", label_counter(event.version) or 0, engine=engine)

    def _of_run(self, event: Event) -> None:
        if isinstance(event, StepTrained):
            self._add("turnout_train_steps_total")
            self._add("turnout_trained_tokens_total", event.tokens)
            self._add("turnout_masked_tokens_total", event.masked)
            for lag, tokens in event.lags:
                self._lags.observe(lag, tokens)
        elif isinstance(event, PhaseEnded):
            self._add("turnout_phase_seconds_total", event.seconds, who=event.who, phase=event.phase)
        elif isinstance(event, EvalDone):
            self._set("turnout_eval_score", event.score, name=event.name)
        elif isinstance(event, RunStalled):
            self._add("turnout_stalls_total")
        elif isinstance(event, RunStarted):
            about = {
                "run_id": event.run_id,
                "schedule": event.schedule,
                "incarnation": str(event.incarnation),
            }
            self._values["turnout_run_info"].clear()
            self._set("turnout_run_info", 1, **about)


def gauge_name(key: str) -> str:
    """The name of a number of metrics.jsonl."""
    if key.startswith(SECONDS):
        key = f"step_{key.removeprefix(SECONDS)}_seconds"
    elif key.startswith(MEMORY):
        key = f"memory_{key.removeprefix(MEMORY)}"
    return "turnout_" + re.sub(r"[^a-z0-9]", "_", key.lower())
