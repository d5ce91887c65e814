"""The audit of a run: rules over its events, each the check of one invariant of docs/architecture.md.

Owns what a right log looks like. Promises: rules are pure and independent; each runs on every log, also of a run
that died; a violation names the group, version or step. A rule that says nothing has passed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from turnout.core.events import (
    Event,
    GroupCompleted,
    GroupDropped,
    GroupRequeued,
    GroupTaken,
    GroupTrained,
    RunEnded,
    RunStarted,
    StepTrained,
)
from turnout.observe.audit_groups import REQUEUE_RULES
from turnout.observe.audit_log import as_one, ended_well, of_kind
from turnout.observe.audit_models import frozen_models_stay
from turnout.observe.audit_versions import VERSION_RULES

MAX_DETAILS = 20

Rule = Callable[[Sequence[Event]], Iterator[str]]


@dataclass(frozen=True)
class AuditReport:
    """`passed` are names of rules, `failed` pairs of (rule, what is wrong): at most MAX_DETAILS of each rule."""

    passed: list[str]
    failed: list[tuple[str, str]]

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def failed_rules(self) -> list[str]:
        return list(dict.fromkeys(rule for rule, _ in self.failed))


@dataclass(frozen=True)
class GroupCounts:
    """What became of the groups. `open` were under way when the run died; at a normal end they are `lost`. The next
    attempt of a `requeued` one is a group of its own: taken = trained + dropped + requeued + open + lost."""

    taken: int
    trained: int
    dropped: int
    open: int
    lost: int
    requeued: int = 0


def audit(events: Iterable[Event]) -> AuditReport:
    """Runs every rule over the events of one run."""
    log = list(events)
    one = as_one(log)
    passed: list[str] = []
    failed: list[tuple[str, str]] = []
    for rule in RULES:
        details = list(rule(one if rule in GROUP_RULES else log))
        if details:
            hidden = len(details) - MAX_DETAILS
            shown = details[:MAX_DETAILS] + ([f"and {hidden} more"] if hidden > 0 else [])
            failed += [(rule.__name__, detail) for detail in shown]
        else:
            passed.append(rule.__name__)
    return AuditReport(passed, failed)


def count_groups(events: Iterable[Event]) -> GroupCounts:
    """The numbers of invariant 1 for the summary."""
    log = as_one(list(events))
    trained = {event.group for event in of_kind(log, GroupTrained)}
    dropped = {event.group for event in of_kind(log, GroupDropped)}
    taken = {event.group for event in of_kind(log, GroupTaken)}
    requeued = {event.group for event in of_kind(log, GroupRequeued)}
    left = len(taken - trained - dropped - requeued)
    lost = left if ended_well(log) else 0
    return GroupCounts(len(taken), len(trained), len(dropped), left - lost, lost, len(requeued))


def log_opens_and_closes_once(log: Sequence[Event]) -> Iterator[str]:
    """One run, one log: RunStarted is the first event, each later one is of a later incarnation of the same run,
    and nothing else follows RunEnded."""
    if not log or not isinstance(log[0], RunStarted):
        yield "the first event is not RunStarted"
    for earlier, later in pairwise(of_kind(log, RunStarted)):
        if later.run_id != earlier.run_id or later.incarnation <= earlier.incarnation:
            yield f"incarnation {earlier.incarnation} is followed by a RunStarted of {later.incarnation}"
    for at, event in enumerate(log[:-1]):
        if isinstance(event, RunEnded) and not isinstance(log[at + 1], RunStarted):
            yield f"{len(log) - at - 1} events follow RunEnded, the first is {type(log[at + 1]).__name__}"
            return


def each_group_ends_once(log: Sequence[Event]) -> Iterator[str]:
    """Invariant 1: a prompt taken is trained once or dropped once, and nothing ends that wasn't taken. What is
    open when a run dies is no fault; what is open at its normal end is lost."""
    ends: dict[str, list[str]] = {}
    for event in log:
        if isinstance(event, GroupTaken):
            if event.group in ends:
                yield f"group {event.group} was taken twice"
            ends.setdefault(event.group, [])
        elif isinstance(event, GroupTrained | GroupDropped | GroupRequeued):
            if event.group not in ends:
                yield f"group {event.group} ended but was never taken"
            ends.setdefault(event.group, []).append(type(event).__name__.removeprefix("Group").lower())
    for group, how in ends.items():
        if len(how) > 1:
            yield f"group {group} ended {len(how)} times: {', '.join(how)}"
        if not how and ended_well(log):
            yield f"group {group} is lost: taken, and neither trained nor dropped"


def trained_groups_were_completed(log: Sequence[Event]) -> Iterator[str]:
    """Invariant 1: half a group is never trained; each is completed once, after it was taken and before it ends."""
    taken: set[str] = set()
    completed: set[str] = set()
    for event in log:
        if isinstance(event, GroupTaken):
            taken.add(event.group)
        elif isinstance(event, GroupCompleted):
            if event.group in completed or event.group not in taken:
                why = "twice" if event.group in completed else "without being taken"
                yield f"group {event.group} was completed {why}"
            completed.add(event.group)
        elif isinstance(event, GroupTrained) and event.group not in completed:
            yield f"group {event.group} was trained before it was complete"


def lengths_agree(log: Sequence[Event]) -> Iterator[str]:
    """Invariant 2: tokens, log-probs, mask entries and version spans of a member have one length, and a complete
    group has a reward for every member."""
    for event in of_kind(log, GroupCompleted):
        for member, lengths in enumerate(event.lengths):
            if len(lengths) != 4 or len(set(lengths)) != 1:
                yield f"group {event.group}, member {member}: lengths {lengths} differ"
        if len(event.rewards) != len(event.lengths):
            yield f"group {event.group}: {len(event.lengths)} members but {len(event.rewards)} rewards"


def steps_account_for_groups(log: Sequence[Event]) -> Iterator[str]:
    """Invariant 1: the groups that the steps say they trained are the groups that were trained."""
    if not ended_well(log):
        return
    steps, groups = of_kind(log, StepTrained), of_kind(log, GroupTrained)
    said = sum(event.groups for event in steps)
    if said != len(groups):
        yield f"the steps trained {said} groups by their own count, {len(groups)} groups were trained"
    if len({event.step for event in groups}) != len(steps):
        yield f"groups were trained in {len({event.step for event in groups})} steps, {len(steps)} steps are told"
    for step, times in Counter(event.step for event in steps).items():
        if times > 1:
            yield f"step {step} was trained {times} times"


def nothing_is_left_over(log: Sequence[Event]) -> Iterator[str]:
    """Invariant 8: no process, port, temporary folder or lock survives the run."""
    for event in of_kind(log, RunEnded):
        for leftover in event.leftovers:
            yield f"left over: {leftover}"


GROUP_RULES: tuple[Rule, ...] = (
    each_group_ends_once,
    trained_groups_were_completed,
    steps_account_for_groups,
)
RULES: tuple[Rule, ...] = (
    log_opens_and_closes_once,
    *GROUP_RULES,
    *REQUEUE_RULES,
    lengths_agree,
    *VERSION_RULES,
    frozen_models_stay,
    nothing_is_left_over,
)
