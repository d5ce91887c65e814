"""After a run: audit its events, write summary.json, trace.json and plots, show completions before and after."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise

from turnout.config.run_config import RunConfig
from turnout.config.rundir import RunPaths
from turnout.core.events import VersionCommitted, VersionPublished
from turnout.core.ports import Store
from turnout.observe.audit import audit, count_groups
from turnout.observe.audit_log import of_kind, starts
from turnout.observe.audit_models import models_summary
from turnout.observe.audit_versions import base_version
from turnout.observe.eventlog import read_events
from turnout.observe.metrics import read_metrics
from turnout.observe.panel import PipedConsole
from turnout.observe.plots import write_plots
from turnout.observe.samples import SampleRow, print_samples
from turnout.observe.summary import (
    EvalScore,
    RunSummary,
    engine_summary,
    lag_summary,
    write_summary,
)
from turnout.observe.trace import trace
from turnout.rollout.evaluate import EvalPoint
from turnout.schedule.eval_sets import BASELINE, SAMPLED
from turnout.schedule.evaluations import EvalRuns, point_interval
from turnout.schedule.incarnation import RunOutcome


def finish(config: RunConfig, paths: RunPaths, outcome: RunOutcome, files: Store) -> RunSummary:
    """Audits and writes; called once, however the run ended. It tells of all incarnations of the run."""
    timed = list(read_events(paths.events))
    events = [event for _, event in timed]
    earlier, begins = 0.0, starts(events)
    for begin, end in pairwise(begins):
        earlier += timed[end - 1][0] - timed[begin][0]
    committed = {event.version for event in of_kind(events, VersionCommitted)}
    mismatch = outcome.curves.mismatch
    before, after = _points(outcome.evals, None)
    extra: dict[str, object] = {"reason": outcome.reason, "seed": config.seed, "incarnations": len(begins)}
    extra["evaluations"] = [] if outcome.evals is None else _all_points(outcome.evals)
    extra["weight_versions"] = _versions([event for event in events if isinstance(event, VersionPublished)])
    extra["control_bytes_max"] = outcome.traffic.control_bytes_max
    extra["data_bytes"] = sum(event.bytes for event in of_kind(events, VersionPublished))
    extra["later_turns_cache_hit"] = outcome.curves.cache_hit
    extra["engines"] = engine_summary(events)
    extra |= {"weights_root": outcome.weights_root} if outcome.weights_root else {}
    extra["ranks"] = {
        "count": config.actor_gpus,
        "tensor_parallel": config.tensor_model_parallel_size,
        "expert_parallel": config.expert_model_parallel_size,
    }
    extra |= lag_summary(events) | models_summary(events)
    for key, name in (("eval_sampled", SAMPLED), ("eval_baseline", BASELINE)):
        first, last = _points(outcome.evals, name)
        extra |= {f"{key}_before": _json(first)} | ({f"{key}_after": _json(last)} if name == SAMPLED else {})
    summary = RunSummary(
        status=outcome.status,
        rewards=outcome.curves.rewards,
        seconds_total=earlier + outcome.seconds_total,
        seconds_training=outcome.seconds_training,
        weight_versions_committed=len(committed - {base_version(events)}),
        groups=count_groups(events),
        audit=audit(events),
        eval_before=before,
        eval_after=after,
        mismatch_mean_abs_logprob=sum(mismatch) / len(mismatch) if mismatch else None,
        extra=extra,
    )
    write_summary(files, paths.summary, summary)
    files.publish_file(paths.trace, trace(timed, config.run_name or "run"))
    if config.plots and outcome.curves.rewards:
        write_plots(read_metrics(paths.metrics), paths.plots, config.run_name or "run")
    return summary


def show(config: RunConfig, paths: RunPaths, outcome: RunOutcome, summary: RunSummary) -> None:
    """What a person wants to know at the end, on stdout."""
    console = PipedConsole()
    if outcome.evals is not None:
        print_samples(_sample_rows(outcome.evals, config.before_after_samples), console)
    row = summary.to_json()
    lines = [
        f"reward       {_number(row['reward_first'])} -> {_number(row['reward_last'])} over {row['steps']} steps"
    ]
    if summary.eval_before is not None and summary.eval_after is not None:
        lines.append(f"held-out     {_score(summary.eval_before)} -> {_score(summary.eval_after)}")
    lines += [
        f"time         {outcome.seconds_training:.0f} s of training, {outcome.seconds_total:.0f} s in all",
        f"audit        {row['audit']['passed']} rules passed, {row['audit']['failed']} failed",
        *(f"             {detail}" for detail in row["audit"]["details"]),
        f"checkpoint   {outcome.final_folder or 'none'}",
        f"run          {paths.root} (summary.json, metrics.jsonl, events.jsonl, trace.json"
        + (", plots/plots.png)" if config.plots else ")"),
    ]
    if not config.train_only:  # those have no ledger to look into, and are not found
        lines.append(f"dashboard    turnout dash {paths.shown}")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _versions(published: list[VersionPublished]) -> dict[str, object]:
    """What the versions of a run took on their way."""
    return {
        "published": len(published),
        "in_full": sum(not event.encoding for event in published),
        "encodings": sorted({event.encoding for event in published} - {""}),
        "bytes": sum(event.bytes for event in published),
        "density_mean": sum(event.density for event in published) / len(published) if published else None,
    }


def _all_points(evals: EvalRuns) -> list[dict[str, object]]:
    """Every point of the run, as summary.json tells it."""
    return [
        {
            "name": name,
            "step": step,
            "version": point.version,
            **asdict(eval_score(point)),
            "pass_at": {str(one.k): one.value for one in point.pass_at},
        }
        for (name, step), point in sorted(evals.points.items(), key=lambda item: item[0][1])
    ]


def _points(evals: EvalRuns | None, name: str | None) -> tuple[EvalScore | None, EvalScore | None]:
    """The first and the last point of a set (None: of the first set)."""
    if evals is None:
        return None, None
    name = evals.first_set if name is None else name
    first, last = evals.first_and_last(name)
    return eval_score(first) if first else None, eval_score(last) if last else None


def eval_score(point: EvalPoint) -> EvalScore:
    """The score of a point with its 95 % interval."""
    low, high = point_interval(point)
    return EvalScore(point.score, low, high, point.items, point.failed)


def _json(score: EvalScore | None) -> dict[str, float | int] | None:
    return None if score is None else dict(vars(score))


def _sample_rows(evals: EvalRuns, count: int) -> list[SampleRow]:
    first, last = evals.first_and_last(evals.first_set)
    if first is None or last is None:
        return []
    return [
        SampleRow(
            before.prompt.text,
            str(before.prompt.label),
            before.text,
            after.text,
            before.reward,
            after.reward,
        )
        for before, after in list(zip(first.samples, last.samples))[:count]
    ]


def _score(score: EvalScore) -> str:
    return f"{score.score:.3f} [{score.low:.3f}, {score.high:.3f}]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
