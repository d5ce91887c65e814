"""Audit rules about weight versions (see `audit`).

The base of a run is the version that its engines loaded at the start and that the trainer holds as well: it is
named by EngineReady before the first group, it is never published, and its export counts as done at 0 steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from turnout.core.events import (
    EngineReady,
    Event,
    GroupCompleted,
    GroupTaken,
    GroupTrained,
    RunStarted,
    VersionAborted,
    VersionAttested,
    VersionCommitted,
    VersionPublished,
)
from turnout.core.version import label_counter
from turnout.observe.audit_log import ended_well

TRUSTED_LEVELS = frozenset({"memory", "checksum"})


def base_version(log: Sequence[Event]) -> str | None:
    """The version that the engines started with, None where they named none of ours before the first group."""
    for event in log:
        if isinstance(event, EngineReady) and label_counter(event.version) is not None:
            return event.version
        if isinstance(event, GroupTaken):
            return None
    return None


def engines_start_with_one_version(log: Sequence[Event]) -> Iterator[str]:
    """Invariant 4: every engine that becomes ready serves the current version."""
    current = base_version(log)
    for event in log:
        if isinstance(event, VersionCommitted):
            current = event.version
        elif isinstance(event, EngineReady) and event.version != current:
            yield f"engine {event.engine} became ready with {event.version}, current is {current}"


def tokens_are_of_committed_versions(log: Sequence[Event]) -> Iterator[str]:
    """Invariants 3 and 4: no group is completed or trained with a token of a version that wasn't committed by
    then."""
    committed = {base_version(log)}
    for event in log:
        if isinstance(event, VersionCommitted):
            committed.add(event.version)
        elif isinstance(event, GroupCompleted | GroupTrained):
            verb = "trained" if isinstance(event, GroupTrained) else "completed"
            for version in event.versions:
                if version not in committed:
                    yield f"group {event.group} was {verb} with {version}, never committed before"


def lag_is_bounded(log: Sequence[Event]) -> Iterator[str]:
    """Invariant 3: the lag of a group, as recorded and as it follows from the steps at which its versions were
    exported, is within the bound of the run."""
    bound = next((event.max_lag for event in log if isinstance(event, RunStarted)), 0)
    base = base_version(log)
    exported = {} if base is None else {base: 0}
    for event in log:
        if isinstance(event, VersionPublished):
            exported[event.version] = event.step
        elif isinstance(event, GroupTrained):
            if not 0 <= event.lag <= bound:
                yield f"group {event.group} trained with lag {event.lag}, the bound is {bound}"
            real = max((event.step - exported[v] for v in event.versions if v in exported), default=event.lag)
            if real != event.lag:
                yield f"group {event.group} is recorded with lag {event.lag}, its versions make it {real}"


def sync_trains_the_current_version(log: Sequence[Event]) -> Iterator[str]:
    """Invariant 3 in the synchronous schedule: every token of a step was made by the version that is current."""
    if not any(isinstance(event, RunStarted) and event.schedule == "sync" for event in log):
        return
    current = base_version(log)
    for event in log:
        if isinstance(event, VersionCommitted):
            current = event.version
        elif isinstance(event, GroupTrained) and set(event.versions) - {current}:
            yield f"group {event.group}, step {event.step}: versions {event.versions}, current is {current}"


def commits_are_attested(log: Sequence[Event]) -> Iterator[str]:
    """Invariant 5: a version is committed only after every required engine computed the published root digest
    itself, from its memory or by checksum."""
    published: dict[str, VersionPublished] = {}
    proved: dict[str, set[str]] = {}
    for event in log:
        if isinstance(event, VersionPublished):
            published[event.version] = event
        elif isinstance(event, VersionAttested):
            told = published.get(event.version)
            if told is not None and event.root == told.root and event.level in TRUSTED_LEVELS:
                proved.setdefault(event.version, set()).add(event.engine)
        elif isinstance(event, VersionCommitted):
            told = published.get(event.version)
            if told is None:
                yield f"{event.version} was committed but never published"
                continue
            if not told.required:
                yield f"{event.version} was committed without any required engine"
            missing = set(told.required) - proved.get(event.version, set())
            if missing:
                yield f"{event.version} was committed without the proof of {', '.join(sorted(missing))}"


def counters_only_rise(log: Sequence[Event]) -> Iterator[str]:
    """Invariant 4: a number is used once, later versions have higher ones, and a label names its own content."""
    base = base_version(log)
    last = None if base is None else label_counter(base)
    for event in log:
        if not isinstance(event, VersionPublished):
            continue
        if last is not None and event.counter <= last:
            yield f"{event.version} has counter {event.counter} after {last}"
        if event.version != f"v{event.counter:06d}-{event.root[:16]}":
            yield f"{event.version} does not name its counter {event.counter} and root {event.root}"
        last = event.counter if last is None else max(last, event.counter)


def versions_end_once(log: Sequence[Event]) -> Iterator[str]:
    """Invariant 4: a version is committed once or aborted; an aborted one never becomes current."""
    ends: dict[str, str] = {}
    for event in log:
        if isinstance(event, VersionCommitted | VersionAborted):
            how = "committed" if isinstance(event, VersionCommitted) else "aborted"
            if event.version in ends and event.version:  # an update that wrote nothing has no label
                yield f"{event.version} was {ends[event.version]}, then {how}"
            ends[event.version] = how


def sync_commits_every_step(log: Sequence[Event]) -> Iterator[str]:
    """Invariant 4 in the synchronous schedule: each train step makes one version, current before the next step."""
    if not any(isinstance(event, RunStarted) and event.schedule == "sync" for event in log):
        return
    waiting: int | None = None
    for event in log:
        if isinstance(event, GroupTrained) and event.step != waiting:
            if waiting is not None:
                yield f"step {event.step} was trained before the version of step {waiting} was committed"
            waiting = event.step
        elif isinstance(event, VersionCommitted):
            if waiting is None:
                yield f"{event.version} was committed without a train step since the last one"
            waiting = None
    if waiting is not None and ended_well(log):
        yield f"the run ended without the version of step {waiting}"


VERSION_RULES = (
    engines_start_with_one_version,
    tokens_are_of_committed_versions,
    lag_is_bounded,
    sync_trains_the_current_version,
    commits_are_attested,
    counters_only_rise,
    versions_end_once,
    sync_commits_every_step,
)
