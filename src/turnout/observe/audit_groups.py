"""Audit rules about groups that don't go straight to their end (see `audit`): cut, resumed, requeued."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from turnout.core.events import (
    Event,
    GroupCompleted,
    GroupCut,
    GroupDropped,
    GroupRequeued,
    GroupResumed,
    GroupTaken,
    RunStarted,
)
from turnout.observe.audit_log import ended_well


def cut_groups_keep_their_tokens(log: Sequence[Event]) -> Iterator[str]:
    """Invariant 2: a group that is cut goes on from the tokens it had, and is not complete before it does. Groups
    that were open when an incarnation ended are cut by the next one's start, with as many as were journalled."""
    under_way: set[str] = set()
    cut: dict[str, int | None] = {}
    for event in log:
        if isinstance(event, RunStarted):
            cut = dict.fromkeys(under_way)
        elif isinstance(event, GroupTaken):
            under_way.add(event.group)
        elif isinstance(event, GroupCut):
            cut[event.group] = event.tokens
        elif isinstance(event, GroupResumed):
            if event.group not in cut:
                yield f"group {event.group} was resumed without being cut"
            elif cut.pop(event.group) not in (None, event.tokens):
                yield f"group {event.group} was resumed with {event.tokens} tokens, not those that it had"
        elif isinstance(event, GroupCompleted | GroupDropped | GroupRequeued):
            if cut.pop(event.group, None) is not None and isinstance(event, GroupCompleted):
                yield f"group {event.group} was complete while it was cut"
            under_way.discard(event.group)


def requeued_prompts_begin_anew(log: Sequence[Event]) -> Iterator[str]:
    """Invariant 1: the attempt that a requeued group names is taken, with the same prompt."""
    prompts: dict[str, str] = {}
    waiting: dict[str, str] = {}
    for event in log:
        if isinstance(event, GroupTaken):
            before = waiting.pop(event.group, None)
            if before is not None and prompts.get(before) != event.prompt:
                yield f"group {event.group} has prompt {event.prompt}, {before} had {prompts.get(before)}"
            prompts[event.group] = event.prompt
        elif isinstance(event, GroupRequeued):
            waiting[event.attempt] = event.group
    if ended_well(log):
        for attempt, group in waiting.items():
            yield f"group {group} was requeued, but {attempt} was never taken"


REQUEUE_RULES = (cut_groups_keep_their_tokens, requeued_prompts_begin_anew)
