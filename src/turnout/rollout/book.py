"""The book of groups: every prompt taken has one state here until its one end.

Owns the state of each group and tells the event log of each change. `open_groups` is what would be lost if
the run ended now; `counts` are the numbers of the summary. Groups that have ended are forgotten but counted,
so memory is bounded by what is open.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from turnout.core.errors import InvariantBroken
from turnout.core.events import GroupCompleted, GroupDropped, GroupTaken, GroupTrained
from turnout.core.ports import EventSink
from turnout.core.types import RolloutGroup, Trajectory
from turnout.rollout.group_machine import TABLE, GroupEvent, GroupState


@dataclass
class GroupBook:
    """States of the groups of one run. Every method raises IllegalTransition for an event out of order."""

    events: EventSink
    taken: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    open_groups: dict[str, GroupState] = field(default_factory=dict)

    def take(self, group: RolloutGroup, step: int) -> None:
        """A prompt left the source for this train step."""
        if group.group_id in self.open_groups:
            raise InvariantBroken(f"group {group.group_id} was taken twice")
        self.open_groups[group.group_id] = GroupState.WAITING
        self.taken += 1
        self.events.emit(GroupTaken(group.group_id, group.prompt.prompt_id, step))

    def start(self, group_id: str) -> None:
        self._move(group_id, GroupEvent.START)

    def complete(self, group: RolloutGroup) -> None:
        self._move(group.group_id, GroupEvent.COMPLETE)
        members = group.trajectories
        lengths = [[len(t.response_ids), len(t.logprobs), len(t.loss_mask), len(t.spans)] for t in members]
        self.events.emit(
            GroupCompleted(
                group.group_id, lengths, versions_of(group), group.rewards, samples_digest(group.trajectories)
            )
        )

    def consume(self, group_id: str) -> None:
        """The group is in a train batch."""
        self._move(group_id, GroupEvent.TAKE)

    def train(self, group: RolloutGroup, step: int, lag: int) -> None:
        self._move(group.group_id, GroupEvent.TRAIN)
        self.trained += 1
        self.events.emit(GroupTrained(group.group_id, step, versions_of(group), lag))

    def drop(self, group_id: str, reason: str) -> None:
        self._move(group_id, GroupEvent.DROP)
        self.dropped[reason] += 1
        self.events.emit(GroupDropped(group_id, reason))

    def counts(self) -> dict[str, int]:
        """taken, trained, dropped, lost: lost is what is neither trained, dropped nor still open."""
        dropped = self.dropped.total()
        lost = self.taken - self.trained - dropped - len(self.open_groups)
        return {"taken": self.taken, "trained": self.trained, "dropped": dropped, "lost": lost}

    def _move(self, group_id: str, event: GroupEvent) -> None:
        state = self.open_groups.get(group_id)
        if state is None:
            raise InvariantBroken(f"group {group_id} got {event} but is not open")
        after = TABLE.after(state, event)
        if after in (GroupState.TRAINED, GroupState.DROPPED):
            del self.open_groups[group_id]
        else:
            self.open_groups[group_id] = after


def versions_of(group: RolloutGroup) -> list[str]:
    """The labels that made any token of the group, sorted."""
    return sorted({label for t in group.trajectories for label in t.spans.labels})


def samples_digest(samples: Iterable[Trajectory]) -> str:
    """16 hex digits over token ids and the exact log-probs of samples in order."""
    text = repr([(t.response_ids, t.logprobs) for t in samples])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
