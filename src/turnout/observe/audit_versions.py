"""Audit rules about weight versions (see `audit`).

The base of a run is what its engines loaded at the start and the trainer holds as well. It is never published: it
becomes current by a VersionCommitted before the first group, once every engine that is ready has attested it, and
its export counts as done at 0 steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from turnout.core.events import (
    EngineFenced,
    EngineReady,
    Event,
    GroupCompleted,
    GroupTaken,
    GroupTrained,
    RunStarted,
    StepTrained,
    VersionAborted,
    VersionAttested,
    VersionCommitted,
    VersionPrepared,
    VersionPublished,
)
from turnout.core.version import label_counter
from turnout.observe.audit_log import ended_well, of_kind

TRUSTED_LEVELS = frozenset({"memory", "checksum"})


def content(label: str | None) -> str | None:
    """The part of a label that names the weights: equal for a version that a resumed run made again."""
    return None if label is None else label.rpartition("-")[2]


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


def steps_count_their_tokens_by_lag(log: Sequence[Event]) -> Iterator[str]:
    """Invariant 3, token by token: those that carried loss in a step are all counted, each within the bound."""
    bound = next((event.max_lag for event in log if isinstance(event, RunStarted)), 0)
    for event in of_kind(log, StepTrained):
        for lag, tokens in event.lags:
            if not 0 <= lag <= bound and tokens:
                yield f"step {event.step} trained {tokens} tokens of lag {lag}, the bound is {bound}"
        counted = sum(tokens for _, tokens in event.lags)
        if counted != event.tokens:
            yield f"step {event.step} trained {event.tokens} tokens, {counted} of them are known by their lag"


def sync_trains_the_current_version(log: Sequence[Event]) -> Iterator[str]:
    """Invariant 3 in the synchronous schedule: every token of a step was made by the version that is current; but
    where responses go on in later rollouts, which the bound on the lag shows, it is that bound that holds."""
    starts = of_kind(log, RunStarted)
    if not any(event.schedule == "sync" and event.max_lag < event.update_interval for event in starts):
        return
    current: str | None = None
    for event in log:
        if isinstance(event, VersionCommitted):
            current = event.version
        elif isinstance(event, GroupTrained) and {*map(content, event.versions)} - {content(current)}:
            yield f"group {event.group}, step {event.step}: versions {event.versions}, current is {current}"


def commits_are_attested(log: Sequence[Event]) -> Iterator[str]:
    """Invariant 5: a version is committed only after every required engine that was not fenced meanwhile computed
    the published root digest itself, from its memory or by checksum (in a run that trusts labels: named it), and
    these were enough (where they follow, by enough of them). The base is required of every engine that is ready
    in its incarnation; a run without engines commits by itself what it publishes for none."""
    base = base_version(log)
    trusted = TRUSTED_LEVELS
    updates: dict[str, _Required] = {}
    ready: set[str] = set()
    for event in log:
        if isinstance(event, RunStarted):
            ready.clear()
            trusted = TRUSTED_LEVELS | {"label"} if event.trust_label else trusted
        elif isinstance(event, EngineReady) and event.updated:
            ready.add(event.engine)
        elif isinstance(event, VersionPublished):
            needed = _Required(event.root, set(event.required), event.at_least, event.follow)
            updates[event.version] = needed
        elif isinstance(event, EngineFenced) and event.version in updates:
            updates[event.version].engines.discard(event.engine)
        elif isinstance(event, VersionAttested) and event.level in trusted:
            if event.version == base:  # the first engine's root; the others must agree with it
                updates.setdefault(event.version, _Required(event.root, ready, 1))
            update = updates.get(event.version)
            if update is not None and event.root == update.root:
                update.proved.add(event.engine)
        elif isinstance(event, VersionCommitted):
            update = updates.get(event.version)
            if update is not None or ready or event.version != base:
                yield from _unproved(event.version, update)


@dataclass
class _Required:
    """What the commit of a version needs, and who proved it."""

    root: str
    engines: set[str]
    at_least: int
    follow: bool = False
    proved: set[str] = field(default_factory=set[str])


def _unproved(version: str, update: _Required | None) -> Iterator[str]:
    if update is None:
        yield f"{version} was committed but never published"
        return
    missing = set[str]() if update.follow else update.engines - update.proved
    counted = update.engines & update.proved if update.follow else update.engines
    if not update.engines and update.at_least:
        yield f"{version} was committed without any required engine"
    elif missing:
        yield f"{version} was committed without the proof of {', '.join(sorted(missing))}"
    elif len(counted) < update.at_least:
        yield f"{version} was committed by {len(counted)} engines, {update.at_least} are needed"


def engines_activate_what_they_prepared(log: Sequence[Event]) -> Iterator[str]:
    """Invariant 4: in an update an engine attests the version only after it had prepared it while it served; one
    that follows is asked for nothing."""
    required: dict[str, set[str]] = {}
    prepared: set[tuple[str, str]] = set()
    committed: set[str] = set()
    for event in log:
        if isinstance(event, VersionPublished):
            required[event.version] = set() if event.follow else set(event.required)
        elif isinstance(event, VersionPrepared):
            prepared.add((event.engine, event.version))
        elif isinstance(event, VersionCommitted):
            committed.add(event.version)
        elif isinstance(event, VersionAttested) and event.version not in committed:
            asked = event.engine in required.get(event.version, set())
            if asked and (event.engine, event.version) not in prepared:
                yield f"engine {event.engine} attested {event.version}, which it had not prepared"


def tentative_engines_are_fenced(log: Sequence[Event]) -> Iterator[str]:
    """Invariant 4: an engine that attested a version which was then aborted is fenced before a group is taken or
    the next version is published."""
    serving: dict[str, str] = {}
    fenced: set[str] = set()
    aborted: set[str] = set()
    for event in log:
        if isinstance(event, VersionAttested):
            serving[event.engine] = event.version
            fenced.discard(event.engine)
        elif isinstance(event, EngineFenced):
            fenced.add(event.engine)
        elif isinstance(event, VersionAborted):
            aborted.add(event.version)
        elif isinstance(event, GroupTaken | VersionPublished):
            for engine, version in serving.items():
                if version in aborted and engine not in fenced:
                    yield f"engine {engine} attested {version}, which was aborted, and was not fenced"


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
    base = base_version(log)
    for event in log:
        if isinstance(event, VersionCommitted | VersionAborted):
            how = "committed" if isinstance(event, VersionCommitted) else "aborted"
            known = event.version in ends and event.version  # an update that wrote nothing has no label
            if known and event.version != base:  # which every incarnation begins with
                yield f"{event.version} was {ends[event.version]}, then {how}"
            ends[event.version] = how


def sync_commits_every_step(log: Sequence[Event]) -> Iterator[str]:
    """Invariant 4 in the synchronous schedule: each train step makes one version, current before the next step,
    unless several steps share one (--update-weights-interval). A resumed incarnation begins with the version of its
    checkpoint."""
    starts = [event for event in log if isinstance(event, RunStarted)]
    if not any(start.schedule == "sync" and start.update_interval == 1 for start in starts):
        return
    waiting: int | None = None
    base = base_version(log)
    restored = False
    for event in log:
        if isinstance(event, RunStarted):
            waiting, restored = None, event.resumed_at is not None
        elif isinstance(event, GroupTrained) and event.step != waiting:
            if waiting is not None:
                yield f"step {event.step} was trained before the version of step {waiting} was committed"
            waiting = event.step
        elif isinstance(event, VersionCommitted):
            if waiting is None and event.version != base and not restored:
                yield f"{event.version} was committed without a train step since the last one"
            restored = restored and event.version == base
            waiting = None
    if waiting is not None and ended_well(log):
        yield f"the run ended without the version of step {waiting}"


VERSION_RULES = (
    engines_join_with_the_current_version,
    tokens_are_of_committed_versions,
    lag_is_bounded,
    steps_count_their_tokens_by_lag,
    sync_trains_the_current_version,
    commits_are_attested,
    engines_activate_what_they_prepared,
    tentative_engines_are_fenced,
    counters_only_rise,
    versions_end_once,
    sync_commits_every_step,
)
