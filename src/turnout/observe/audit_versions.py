"""Audit rules about weight versions (see `audit`).

The base of a run is what its engines loaded at the start and the trainer holds as well. It is never published: it
becomes current by a VersionCommitted before the first group, once every engine that is ready has attested it, and
its export counts as done at 0 steps.
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
    """The version that is committed before the first group without being published; None where there is none."""
    for event in log:
        if isinstance(event, VersionCommitted):
            return event.version
        if isinstance(event, GroupTaken | VersionPublished):
            return None
    return None


def engines_join_with_the_current_version(log: Sequence[Event]) -> Iterator[str]:
    """Invariant 4: an engine that becomes ready with a version of the run has the current one. One that has no
    version of the run yet serves no group, since tokens of such a version never count."""
    current: str | None = None
    for event in log:
        if isinstance(event, VersionCommitted):
            current = event.version
        elif (
            isinstance(event, EngineReady)
            and event.version != current
            and label_counter(event.version) is not None
        ):
            yield f"engine {event.engine} became ready with {event.version}, current is {current}"


def tokens_are_of_committed_versions(log: Sequence[Event]) -> Iterator[str]:
    """Invariants 3 and 4: no group is completed or trained with a token of a version that wasn't committed by
    then."""
    committed: set[str] = set()
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
    current: str | None = None
    for event in log:
        if isinstance(event, VersionCommitted):
            current = event.version
        elif isinstance(event, GroupTrained) and set(event.versions) - {current}:
            yield f"group {event.group}, step {event.step}: versions {event.versions}, current is {current}"


def commits_are_attested(log: Sequence[Event]) -> Iterator[str]:
    """Invariant 5: a version is committed only after every required engine computed the published root digest
    itself, from its memory or by checksum. The base is required of every engine that is ready."""
    base = base_version(log)
    roots: dict[str, str] = {}
    required: dict[str, set[str]] = {}
    proved: dict[str, set[str]] = {}
    ready: set[str] = set()
    for event in log:
        if isinstance(event, EngineReady):
            ready.add(event.engine)
        elif isinstance(event, VersionPublished):
            roots[event.version], required[event.version] = event.root, set(event.required)
        elif isinstance(event, VersionAttested) and event.level in TRUSTED_LEVELS:
            if event.version == base:
                roots.setdefault(
                    event.version, event.root
                )  # the first engine's; the others must agree with it
            if event.root == roots.get(event.version):
                proved.setdefault(event.version, set()).add(event.engine)
        elif isinstance(event, VersionCommitted):
            needs = ready if event.version == base else required.get(event.version)
            yield from _unproved(event.version, needs, proved.get(event.version, set()))


def _unproved(version: str, required: set[str] | None, proved: set[str]) -> Iterator[str]:
    if required is None:
        yield f"{version} was committed but never published"
    elif not required:
        yield f"{version} was committed without any required engine"
    elif required - proved:
        yield f"{version} was committed without the proof of {', '.join(sorted(required - proved))}"


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
    base = base_version(log)
    for event in log:
        if isinstance(event, GroupTrained) and event.step != waiting:
            if waiting is not None:
                yield f"step {event.step} was trained before the version of step {waiting} was committed"
            waiting = event.step
        elif isinstance(event, VersionCommitted):
            if waiting is None and event.version != base:
                yield f"{event.version} was committed without a train step since the last one"
            waiting = None
    if waiting is not None and ended_well(log):
        yield f"the run ended without the version of step {waiting}"


VERSION_RULES = (
    engines_join_with_the_current_version,
    tokens_are_of_committed_versions,
    lag_is_bounded,
    sync_trains_the_current_version,
    commits_are_attested,
    counters_only_rise,
    versions_end_once,
    sync_commits_every_step,
)
