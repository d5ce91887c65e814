"""A weight version: what it was made from, how it went out, who loaded it when, and what it made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from turnout.cli.answers.run import Answer, Run, clock_time, not_there, number_of
from turnout.core.errors import WeightError
from turnout.core.events import (
    VersionAborted,
    VersionAttested,
    VersionCommitted,
    VersionPrepared,
    VersionPublished,
)
from turnout.observe.timeline import UPDATE, spans
from turnout.rollout.ledger_rows import VersionRow
from turnout.weights.manifest import load_manifest


def version(run: Run, wanted: str) -> Answer:
    """`wanted` is a label or a counter; raises ConfigError."""
    row = _found(run, wanted)
    label = row.label
    told: Answer = {
        "version": label,
        "incarnation": row.incarnation,
        "counter": row.counter,
        "root": row.root,
        "state": row.state,
        "train_steps": row.step,
        "base": _base(run, row),
        "made_from": [],
        "engines": [],
    }
    if row.step and (batch := run.ledger.batch(row.step - 1)) is not None:
        told["made_from"] = list(batch.group_ids)
    engines: dict[str, Answer] = {}
    for at, event in run.events:
        if getattr(event, "version", None) != label:
            continue
        if isinstance(event, VersionPublished):
            told |= {"published_at": at, "bytes": event.bytes, "density": event.density}
            told |= {"encoding": event.encoding, "required": event.required}
        elif isinstance(event, VersionPrepared | VersionAttested):
            one = engines.setdefault(event.engine, {"engine": event.engine})
            kind = "prepared_at" if isinstance(event, VersionPrepared) else "attested_at"
            one.setdefault(kind, at)
            if isinstance(event, VersionAttested):
                one["level"] = event.level
        elif isinstance(event, VersionCommitted):
            told["committed_at"] = at
        elif isinstance(event, VersionAborted):
            told |= {"aborted_at": at, "reason": event.reason}
    phases = [span for span in spans(run.events) if span.lane == UPDATE and span.args.get("version") == label]
    told["phases"] = [{"phase": span.name, "seconds": round(span.seconds, 6)} for span in phases]
    return told | {"engines": list(engines.values()), **_made(run, row)}


def _found(run: Run, wanted: str) -> VersionRow:
    """Of versions with one counter the last one."""
    if wanted in run.versions:
        return run.versions[wanted]
    counter = number_of(wanted.removeprefix("v"))
    rows = [row for row in run.versions.values() if row.counter == counter]
    if not rows:
        raise not_there("--version", wanted, run.versions)
    return max(rows, key=lambda row: row.incarnation)


def _base(run: Run, row: VersionRow) -> str | None:
    """What a delta was made against, as long as its folder is there."""
    weights = run.config.get("update_weight_disk_dir")
    root = run.folder / "weights" if not weights or "://" in str(weights) else run.folder / str(weights)
    try:
        base = load_manifest(root / f"weight_v{row.counter:06d}").base
    except WeightError:
        return None
    return None if base is None else base.label


def _made(run: Run, row: VersionRow) -> Answer:
    """What was sampled with it: tokens by what became of their groups, and of trained ones by their lag."""
    groups: dict[str, int] = {}
    for group_id, piece in run.ledger.every_piece():
        tokens = sum(count for count, label in piece["versions"] if label == row.label)
        if tokens:
            groups[group_id] = groups.get(group_id, 0) + tokens
    states, lags = Counter[str](), Counter[int]()
    for group_id, tokens in groups.items():
        found = run.ledger.find(group_id)
        if found is not None:
            states[found.state.value] += tokens
            if found.trained is not None:
                lags[found.trained - row.step] += tokens
    return {
        "groups": len(groups),
        "tokens": sum(groups.values()),
        "tokens_by_state": dict(states),
        "trained_tokens_by_lag": {str(lag): lags[lag] for lag in sorted(lags)},
    }


def version_lines(told: Answer) -> Iterator[str]:
    born = f"counter {told['counter']}, incarnation {told['incarnation']}"
    yield f"version {told['version']}: {told['state']}, {born}"
    yield f"  root       {told['root']}"
    groups = told["made_from"]
    step = f"step {told['train_steps'] - 1} of {len(groups)} groups" if groups else "the start of the run"
    yield f"  made by    {step}, after {told['train_steps']} train steps"
    if "bytes" in told:
        how = (
            f"{told['encoding']}, {100 * told['density']:.3g} % of elements"
            if told["encoding"]
            else "in full"
        )
        base = f", on {told['base']}" if told["base"] else ""
        yield f"  published  {clock_time(told['published_at'])}, {told['bytes']} bytes, {how}{base}"
    for one in told["phases"]:
        yield f"  {one['phase']:<10} {one['seconds']:.3f} s"
    for one in told["engines"]:
        prepared = f"prepared {clock_time(one['prepared_at'])}, " if "prepared_at" in one else ""
        proved = "never attested"
        if "attested_at" in one:
            proved = f"attested {clock_time(one['attested_at'])} ({one['level']})"
        yield f"  engine     {one['engine']}: {prepared}{proved}"
    if "committed_at" in told:
        yield f"  committed  {clock_time(told['committed_at'])}"
    if "aborted_at" in told:
        yield f"  aborted    {clock_time(told['aborted_at'])}: {told['reason']}"
    by_state = ", ".join(f"{count} {state}" for state, count in told["tokens_by_state"].items())
    yield f"  generated  {told['tokens']} tokens in {told['groups']} groups{f': {by_state}' if by_state else ''}"
    for lag, count in told["trained_tokens_by_lag"].items():
        yield f"    lag {lag}: {count} tokens of trained groups"
