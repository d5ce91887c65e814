"""The plan as text and as JSON: what is recommended and why, with every number's source. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from turnout.plan.cluster import GB, Found
from turnout.plan.flags import Flags
from turnout.plan.layouts import USABLE, Work
from turnout.plan.search import Candidate
from turnout.plan.timing import Prediction, Span

WIDTH = 64  # columns of the timeline
ROWS = 8  # of the alternatives
SHADES = " .:+#"
LETTERS = {"rollout": "R", "train": "T", "update": "u"}


@dataclass(frozen=True)
class Plan:
    """What is told. `best` None: nothing fits, `lacking` says what would. `own`: the run as it is configured, where
    that could be predicted; `usable`: the best whose flags pass, where the best's do not."""

    run: str
    found: Found
    work: Work
    lengths_from: str
    rows: Sequence[Candidate]
    best: Candidate | None
    flags: Flags | None = None
    usable: tuple[Candidate, Flags] | None = None
    own: Prediction | None = None
    lacking: str = ""


def render(plan: Plan) -> str:
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    work, cluster = plan.work, plan.found.cluster
    yield (
        f"Plan for {plan.run} on {cluster.name}: {cluster.machines} x {cluster.devices_per_machine} "
        f"{cluster.device.name} of {cluster.device.memory_gb:.3g} GB ({plan.found.source})"
    )
    shape = work.shape
    yield (
        f"Model: {_count(shape.params)} parameters ({_count(shape.active)} for a token), "
        f"{shape.kv_bytes / 1e3:.4g} kB of KV a token, from its config.json"
    )
    yield (
        f"A step: {work.groups} prompts of {work.prompt:.0f} tokens x {work.samples} samples; responses of "
        f"{work.mean:.0f} tokens at the mean, {max(work.lengths)} at most ({plan.lengths_from})"
    )
    if plan.best is None:
        yield f"\nNothing fits. {plan.lacking}"
        yield from _misfits(plan.rows)
        return
    yield from _best(plan.best, cluster.memory * USABLE, cluster.cores)
    yield from _timeline(plan.best)
    untold = "not predicted: its layout or its transport is none of the planner's here, or it does not fit"
    yield f"\nAs configured: {untold if plan.own is None else _told(plan.own)}"
    yield from _others(plan.rows, plan.best)
    yield from _misfits(plan.rows)
    yield from _flags(plan)


def _best(best: Candidate, room: float, cores: bool) -> Iterator[str]:
    assert best.prediction is not None and best.parts is not None and best.rates is not None
    yield f"\nRecommended: {best.name}"
    yield f"  {_told(best.prediction)}"
    limit = "all processes share the memory" if cores else f"of {room / GB:.1f} usable"
    yield f"Memory of a {'process' if cores else 'device'}, GB ({limit})"
    for half, parts in (("trainer", best.fit.trainer), ("engine", best.fit.engine)):
        shown = ", ".join(f"{name} {size / GB:.2f}" for name, size in parts.items() if size)
        yield f"  {half:<8} {sum(parts.values()) / GB:7.2f}: {shown}"
    yield f"  an engine's KV holds {best.fit.kv_tokens} tokens: {best.fit.lanes} requests at once"
    yield "Times"
    for name, value, source in _times(best):
        yield f"  {name:<28} {_seconds(value):>10}  {source}"
    if best.parts.sharing > 1:
        yield f"  while both compute, each takes {best.parts.sharing:g} times as long (assumed: they share devices)"


def _times(best: Candidate) -> Iterator[tuple[str, float, str]]:
    speed, parts, update = best.rates, best.parts, best.update
    assert speed is not None and parts is not None and update is not None
    for name, figure in (
        ("decode step of an engine", speed.base_s),
        ("  and for each request", speed.request_s),
        ("prompt token", speed.prefill_token_s),
        ("train step besides tokens", speed.train_base_s),
        ("trained token", speed.train_token_s),
    ):
        yield name, figure.value, f"{figure.source}: {figure.how}"
    yield "rollout of a step alone", parts.rollout_s, "reckoned: continuous batching of these lengths"
    yield "train step", parts.train_s, f"reckoned: {parts.work.tokens:.0f} tokens"
    yield f"update by {update.transport}", update.seconds, f"{update.figure.source}: {update.figure.how}"
    if parts.swap_s:
        yield "memory out and in", parts.swap_s, "reckoned: 12 bytes a parameter by the host link, twice"


def _told(prediction: Prediction) -> str:
    how = "production's control plane in virtual time" if prediction.simulated else "reckoned"
    return (
        f"step {_seconds(prediction.step_s)}, lag at most {prediction.lag} ({prediction.mean_lag:.1f} at the "
        f"mean); idle: trainer {1 - prediction.trainer:.0%}, engines {1 - prediction.engines:.0%} ({how})"
    )


def _timeline(best: Candidate) -> Iterator[str]:
    assert best.prediction is not None
    spans = best.prediction.spans
    end = max((span.end for span in spans), default=0.0)
    if end <= 0:
        return
    note = "shade: share of lanes in use" if best.prediction.simulated else "R rollout, T train, u update"
    yield f"Timeline, {_seconds(end)} ({note})"
    for lane in dict.fromkeys(span.lane for span in spans):
        yield f"  {lane:<8} |{_bar([span for span in spans if span.lane == lane], end)}|"


def _bar(spans: list[Span], end: float) -> str:
    cells = [" "] * WIDTH
    for span in spans:
        letter = LETTERS.get(span.what)
        if letter is None:
            letter = SHADES[min(len(SHADES) - 1, round(float(span.what) * (len(SHADES) - 1)))]
        first, last = int(span.begin / end * WIDTH), max(1, round(span.end / end * WIDTH))
        for at in range(first, min(WIDTH, max(first + 1, last))):
            cells[at] = letter
    return "".join(cells)


def _others(rows: Sequence[Candidate], best: Candidate) -> Iterator[str]:
    """The best of each kind of layout and each schedule."""
    yield "\nAlternatives (the best of each kind; times as above)"
    seen = {_kind(best)}
    for row in rows:
        if row.prediction is None or _kind(row) in seen or len(seen) > ROWS:
            continue
        seen.add(_kind(row))
        yield f"  {row.step_s / best.step_s:5.2f} x  {row.name}"
        yield f"           {_told(row.prediction)}; {why(row, best)}"


def _kind(row: Candidate) -> tuple[str, str, str]:
    return row.layout.kind, row.layout.site, row.schedule


def why(row: Candidate, best: Candidate) -> str:
    """Why it is not recommended, in one clause."""
    prediction, parts = row.prediction, row.parts
    assert prediction is not None and parts is not None and best.prediction is not None
    if row.step_s <= best.step_s:
        return "a little faster, and less simple"
    if row.schedule == "sync":
        return "the halves wait for each other" + (", and take turns on the memory" if parts.swap_s else "")
    if row.schedule == "pipelined" and parts.rollout_s > parts.train_s:
        return f"its longest response ({_seconds(parts.rollout_s)} a rollout) is waited for at each update"
    if parts.sharing > 1:
        return "both halves compute on the same devices"
    if prediction.trainer > prediction.engines:
        return "its trainer is the slower half"
    return "its engines are the slower half"


def _misfits(rows: Sequence[Candidate]) -> Iterator[str]:
    lines = dict.fromkeys(
        f"  {row.layout.name}: {row.fit.why}" for row in rows if row.prediction is None and row.fit.why
    )
    if lines:
        yield f"\nDo not fit ({len(lines)} layouts)"
        yield from list(lines)[:ROWS]


def _flags(plan: Plan) -> Iterator[str]:
    assert plan.flags is not None
    if not plan.flags.refused:
        yield f"\nFlags (they pass `turnout check`'s validation)\n  {plan.flags.line}"
        if plan.found.cluster.machines > 1:
            yield "  They give sizes: this version starts a trainer on one machine only; engines on others by"
            yield "  --cluster ray or --rollout-external-engine-addrs."
        return
    yield f"\nFlags\n  {plan.flags.line}"
    yield "  This version refuses them:"
    for reason in plan.flags.refused:
        yield f"    {reason}"
    if plan.usable is None:
        yield "  No layout that fits is taken by this version."
        return
    row, flags = plan.usable
    assert row.prediction is not None
    yield f"  The best that it takes: {row.name}"
    yield f"    {_told(row.prediction)}"
    yield f"    {flags.line}"


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"
    for unit, factor in (("ms", 1e3), ("us", 1e6)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def _count(value: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"


def to_json(plan: Plan) -> dict[str, Any]:
    """All of it, for programs."""
    return {
        "run": plan.run,
        "cluster": plan.found.cluster.model_dump(),
        "cluster_from": plan.found.source,
        "parameters": plan.work.shape.params,
        "lengths": {"mean": plan.work.mean, "max": max(plan.work.lengths), "from": plan.lengths_from},
        "recommended": None if plan.best is None else _row(plan.best),
        "as_configured": None if plan.own is None else _prediction(plan.own),
        "flags": None if plan.flags is None else list(plan.flags.words),
        "flags_refused": [] if plan.flags is None else list(plan.flags.refused),
        "usable": None
        if plan.usable is None
        else _row(plan.usable[0]) | {"flags": list(plan.usable[1].words)},
        "candidates": [_row(row) for row in plan.rows],
        "lacking": plan.lacking,
    }


def _row(row: Candidate) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": row.name,
        "layout": vars(row.layout),
        "schedule": row.schedule,
        "lead": row.lead,
        "why_not": row.fit.why,
    }
    if row.prediction is None:
        return found
    assert row.rates is not None and row.update is not None and row.parts is not None
    return found | {
        "transport": row.update.transport,
        "update_s": row.update.seconds,
        "rollout_s": row.parts.rollout_s,
        "train_s": row.parts.train_s,
        "memory": {"trainer": row.fit.trainer, "engine": row.fit.engine, "lanes": row.fit.lanes},
        "figures": {name: figure.row() for name, figure in vars(row.rates).items()},
        "prediction": _prediction(row.prediction),
    }


def _prediction(one: Prediction) -> dict[str, Any]:
    return {
        "step_s": one.step_s,
        "lag": one.lag,
        "mean_lag": one.mean_lag,
        "trainer_idle": 1 - one.trainer,
        "engines_idle": 1 - one.engines,
        "simulated": one.simulated,
    }
