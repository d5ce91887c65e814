"""What a run counts: every event where it belongs, names by the conventions, and the queries of the dashboard."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest

from tests.unit.observe.prometheus import parse
from turnout.core.events import (
    EngineFenced,
    EngineLost,
    EngineReady,
    EngineRemoved,
    EngineWorked,
    EvalDone,
    Event,
    GroupCompleted,
    GroupDropped,
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
from turnout.observe.run_metrics import RunMetrics, gauge_name

ROOT = Path(__file__).parents[3]
LABEL = "v000003-0123456789abcdef"
EVENTS: list[Event] = [
    RunStarted("id", 0, 1, "async", 2),
    EngineReady("engine-0", "http://x", 1, "none"),
    GroupTaken("g0", "p", 0),
    GroupTaken("g1", "p", 0),
    GroupTaken("g2", "p", 0),
    EngineWorked("engine-0", 1.5, 4),
    GroupCompleted("g0", [], [], []),
    GroupDropped("g1", "all rewards equal"),
    GroupTrained("g0", 0, [], 0),
    PhaseEnded("run", "train", 2.0),
    PhaseEnded("run", "train", 0.5),
    PhaseEnded("update", "prepare", 0.25),
    StepTrained(0, 1, 100, 1, [[0, 60], [1, 30], [20, 10]], masked=5),
    VersionPublished(LABEL, 0, 3, "01", 1, 4096, ["engine-0"], 1, "packed", 0.02),
    VersionAttested("engine-0", LABEL, "01", "memory"),
    VersionCommitted(LABEL),
    VersionAborted("v000004-0123456789abcdef", "why"),
    EngineFenced("engine-0", "", "no answer"),
    EngineLost("engine-0", "rollout", LABEL, "ended"),
    EvalDone("held-out", LABEL, 1, 0.75, 10, 0),
    RunStalled("line", "root", 30.0),
]
ROW = {
    "rollout/reward_mean": 0.5,
    "seconds/train": 2.5,
    "seconds/step": 4.0,
    "seconds/bubble": 1.0,
    "train/mismatch_mean_abs_logprob": 0.01,
    "rollout/response_len_mean": 20.0,
    "tokens/response": 640.0,
    "memory/released_bytes": 7.0,
    "weight_version": 3.0,
    "eval/held-out/score": 0.75,
}


def counted() -> RunMetrics:
    metrics = RunMetrics("a run")
    for event in EVENTS:
        metrics.take(event)
    metrics.write(1, ROW)
    return metrics


def value(metrics: RunMetrics, name: str, /, **labels: str) -> float:
    found = [
        sample.value
        for sample in parse(metrics.text())[name].samples
        if labels.items() <= sample.labels.items() and sample.labels["run"] == "a run"
    ]
    assert len(found) == 1, name
    return found[0]


@pytest.mark.parametrize(
    ("name", "labels", "wanted"),
    [
        ("turnout_train_steps_total", {}, 1),
        ("turnout_trained_tokens_total", {}, 100),
        ("turnout_masked_tokens_total", {}, 5),
        ("turnout_groups_total", {"state": "taken"}, 3),
        ("turnout_groups_total", {"state": "dropped"}, 1),
        ("turnout_groups_in_flight", {}, 1),
        ("turnout_groups_buffered", {}, 0),
        ("turnout_slots_taken", {}, 1),
        ("turnout_phase_seconds_total", {"who": "run", "phase": "train"}, 2.5),
        ("turnout_phase_seconds_total", {"who": "update"}, 0.25),
        ("turnout_weight_versions_total", {"state": "aborted"}, 1),
        ("turnout_weight_published_bytes_total", {}, 4096),
        ("turnout_weight_version", {}, 3),
        ("turnout_weight_density", {}, 0.02),
        ("turnout_engine_up", {"engine": "engine-0"}, 0),
        ("turnout_engine_starts_total", {"engine": "engine-0"}, 1),
        ("turnout_engine_losses_total", {"engine": "engine-0"}, 1),
        ("turnout_engine_fences_total", {"engine": "engine-0"}, 1),
        ("turnout_engine_busy_seconds_total", {"engine": "engine-0"}, 1.5),
        ("turnout_engine_requests_total", {"engine": "engine-0"}, 4),
        ("turnout_engine_weight_version", {"engine": "engine-0"}, 3),
        ("turnout_eval_score", {"name": "held-out"}, 0.75),
        ("turnout_stalls_total", {}, 1),
        ("turnout_run_info", {"schedule": "async", "incarnation": "0"}, 1),
        ("turnout_rollout_reward_mean", {}, 0.5),
        ("turnout_step_train_seconds", {}, 2.5),
        ("turnout_memory_released_bytes", {}, 7),
    ],
)
def test_each_number_is_what_the_events_say(name: str, labels: dict[str, str], wanted: float) -> None:
    assert value(counted(), name, **labels) == wanted


def test_the_age_of_trained_tokens_is_a_histogram_over_tokens() -> None:
    family = parse(counted().text())["turnout_trained_token_lag_steps"]
    found = {sample.labels["le"]: sample.value for sample in family.samples if "le" in sample.labels}
    assert (found["0"], found["1"], found["16"], found["+Inf"]) == (60, 90, 90, 100)


def test_before_anything_happened_the_text_is_whole() -> None:
    families = parse(RunMetrics("a run").text())
    assert families["turnout_train_steps_total"].samples[0].value == 0
    assert all(name.startswith("turnout_") for name in families)


def test_an_engine_that_was_removed_is_not_told_as_down() -> None:
    metrics = counted()
    metrics.take(EngineRemoved("engine-0", LABEL, "asked"))
    assert not parse(metrics.text())["turnout_engine_up"].samples


def test_what_is_kept_does_not_grow_with_the_steps() -> None:
    metrics = RunMetrics("a run")

    def size_after(steps: range) -> int:
        for step in steps:
            name = f"v{step + 2:06d}-0123456789abcdef"
            for event in (
                GroupTaken(f"g{step}", "p", 0),
                GroupCompleted(f"g{step}", [], [], []),
                GroupTrained(f"g{step}", step, [], 0),
                VersionPublished(name, 0, step + 2, "01", step + 1, 1, [], 1, "", 1.0),
                VersionCommitted(name),
            ):
                metrics.take(event)
        return len(pickle.dumps(metrics))

    assert size_after(range(10, 20)) == size_after(range(20, 99))


def test_names_of_gauges() -> None:
    assert gauge_name("seconds/train_backward") == "turnout_step_train_backward_seconds"
    assert gauge_name("train/grad_norm") == "turnout_train_grad_norm"


def test_every_query_of_the_dashboard_names_a_metric_that_exists() -> None:
    """Those of the controller, of the embedded engine too."""
    known = set()
    for name, family in parse(counted().text()).items():
        known |= (
            {f"{name}_{part}" for part in ("bucket", "sum", "count")}
            if family.kind == "histogram"
            else {name}
        )
    source = (ROOT / "src/turnout/engine/reports.py").read_text()
    known |= set(re.findall(r'"((?:sglang|turnout):[a-z_0-9]+)"', source))
    board = json.loads((ROOT / "docs/grafana/turnout.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 12
    for query in queries:
        names = set(re.findall(r"\b((?:turnout_|turnout:|sglang:)[a-z_0-9]+)", query))
        assert names and names <= known, query
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
