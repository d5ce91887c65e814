"""A candidate run by the production's control plane in virtual time, with the modelled durations.

What is too large for seconds is run as a slice: fewer groups, engines and lanes in the same proportion, so that
each request meets the same pace. Tokens are told in `PIECES` for a mean response. Promises: one candidate gives one
answer, whatever the machine.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from turnout.config.run_config import RunConfig
from turnout.plan.batching import drawn
from turnout.plan.timing import Parts, Prediction, Span
from turnout.sim.model import EngineShape
from turnout.sim.paced import DEADLINE_S, Outcome, Pace, run_virtual

PIECES = 12  # events of a mean response
WHOLE, RESPONSES = 256, 192  # of a step that are run as they are, and of a slice of one that has more
GROUPS = 12  # at least: slots and window are counted in groups
WAY_S = (0.0005, 0.002)
TICKS = 32  # of a step, at which it is noted what runs
ENDLESS = 1 << 40
LENGTHS = 2048


@dataclass(frozen=True)
class Slice:
    """`groups` of a step, on `engines` with `lanes`, each for `whole` real ones."""

    groups: int
    engines: int
    lanes: int
    whole: float


def slice_of(parts: Parts) -> Slice:
    work = parts.work
    groups = work.groups
    if work.responses > WHOLE:
        groups = min(groups, max(GROUPS, RESPONSES // work.samples))
    share = groups / work.groups
    engines = max(1, round(parts.engines * share))
    whole = parts.engines * share / engines
    return Slice(groups, engines, max(1, round(parts.pace.lanes * whole)), whole)


def pace_of(parts: Parts, part: Slice, steps: int) -> Pace:
    """The durations of a slice. A prompt's computation holds all up; here each token of its request does so a
    little."""
    work, pace = parts.work, parts.pace
    piece = work.mean / PIECES
    lengths = [max(1, round(tokens / piece)) for tokens in drawn(work.lengths, LENGTHS)]
    crowd = (pace.request_s + pace.prefill_s / work.mean) * piece / part.whole
    shape = EngineShape(
        1 / (pace.base_s * piece), 1, part.lanes, ENDLESS, float(PIECES), crowd, tuple(lengths)
    )
    update = parts.update
    train_s = parts.train_s + parts.rest_s + parts.swap_s
    return Pace(
        part.engines,
        shape,
        train_s,
        update.publish_s,
        steps,
        update.prepare_s,
        parts.sharing,
        way_s=WAY_S,
        change_s=(update.activate_s / 2, update.activate_s / 2 + 1e-9),
        tick_s=max(1e-6, (train_s + parts.generation_s(1.5)) / 2 / TICKS),
    )


def config_of(base: RunConfig, part: Slice, parts: Parts, changes: dict[str, Any]) -> RunConfig:
    """The run's own options, for a slice; without what reads files or looks at the clock."""
    share = part.groups / base.rollout_batch_size

    def less(value: int | None) -> int | None:
        return None if value is None else max(1, round(value * share))

    config = base.model_copy(update=changes)
    scaled: dict[str, Any] = {
        "rollout_batch_size": part.groups,
        "n_samples_per_prompt": parts.work.samples,
        "over_sampling_batch_size": less(config.over_sampling_batch_size),
        "rollout_slots": less(config.rollout_slots),
        "rollout_window": less(config.rollout_window),
        "rollout_max_concurrency": less(config.rollout_max_concurrency),
        "rollout_max_response_len": 1 << 20,
        "rollout_num_engines": part.engines,
        "kv_high_watermark": None,
        "dynamic_sampling": False,
        "advantage_estimator": "grpo",
        "max_failed_groups": 0,
        "rollout_request_timeout_s": DEADLINE_S / 8,
        "reward_timeout_s": DEADLINE_S / 8,
        "rollout_timeout_s": DEADLINE_S,
        "update_weight_timeout_s": DEADLINE_S,
        "seed": 1,
    }
    if config.schedule == "async" and config.on_weight_update is None:
        scaled["on_weight_update"] = "continue"  # what computing KV again costs is in the pace
    return config.model_copy(update=scaled)


def simulate(
    parts: Parts, config: RunConfig, changes: dict[str, Any], steps: int | None = None
) -> Prediction:
    """`changes` are the candidate's own options. `steps`: as many are run (None: until it repeats)."""
    part = slice_of(parts)
    run = config_of(config, part, parts, changes)
    count = steps or 2 * run.lead + 6
    outcome = run_virtual(run, pace_of(parts, part, count))
    return _prediction(outcome, run.lead, part)


def steady(count: int, lead: int) -> range:
    """The steps of a run that stand for all others: not the first, which fill it, nor the last, which empty it."""
    found = range(min(lead + 1, count - 1), count - lead)
    return found if len(found) >= 2 else range(min(1, count - 1), count)


def _prediction(outcome: Outcome, lead: int, part: Slice) -> Prediction:
    ends = [end for _, end in outcome.steps]
    kept = steady(len(ends), lead)
    begin = ends[kept.start - 1] if kept.start else 0.0
    step = (ends[kept.stop - 1] - begin) / len(kept)
    lags = [lag for at, lag in outcome.lags if at in kept] or [0]
    inside = [count for at, count in outcome.running if begin <= at <= ends[kept.stop - 1]]
    lanes = max(1, part.lanes * part.engines)
    used = fmean(count > 0 for count in inside) if inside else 0.0
    spans = (*_engine_spans(outcome, begin, begin + 4 * step, lanes), *_train_spans(outcome, begin, 4 * step))
    window = ends[kept.stop - 1] - begin
    busy = sum(b - a for a, b in outcome.steps[kept.start : kept.stop]) / window
    return Prediction(step, max(lags), fmean(lags), min(1.0, busy), used, spans, simulated=True)


def _engine_spans(outcome: Outcome, begin: float, end: float, lanes: int) -> list[Span]:
    times = [at for at, _ in outcome.running]
    first, last = bisect.bisect_left(times, begin), bisect.bisect_right(times, end)
    rows = outcome.running[first : last + 1]
    return [
        Span("engines", f"{count / lanes:.2f}", at - begin, after - begin)
        for (at, count), (after, _) in pairwise(rows)
    ]


def _train_spans(outcome: Outcome, begin: float, length: float) -> list[Span]:
    return [
        Span("trainer", "train", max(0.0, a - begin), min(length, b - begin))
        for a, b in outcome.steps
        if b > begin and a < begin + length
    ]
