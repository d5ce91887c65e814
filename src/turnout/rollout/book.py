"""The book of groups: the one place where a group changes its state.

    with book.transaction():        several moves that are written together; each call alone is one, too
        book.admit(group, step)     -> WAITING

Owns the group machine's table as it is applied, what is written of it (turnout.rollout.ledger), and what is told
(core.events). Promises: an event that the table does not allow raises and changes nothing; a move is told after it
is written, never before; the counts by state add up to the groups admitted after every transaction.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

from turnout.core.errors import DataError, Fault
from turnout.core.events import (
    Event,
    GroupCompleted,
    GroupCut,
    GroupDropped,
    GroupRequeued,
    GroupResumed,
    GroupTaken,
    GroupTrained,
)
from turnout.core.ports import EventSink
from turnout.core.types import Prompt, RolloutGroup, Trajectory
from turnout.rollout.group_machine import ENDED, OPEN, TABLE, GroupEvent, GroupState
from turnout.rollout.ledger import Ledger
from turnout.rollout.ledger_rows import GroupRow, next_attempt, token_bytes


class GroupBook:
    """States of the groups of one run. Every move raises IllegalTransition where the table has no such row, and
    InvariantBroken for a group that was never admitted."""

    def __init__(self, events: EventSink, ledger: Ledger) -> None:
        self.ledger, self._events = ledger, events

    def transaction(self) -> AbstractContextManager[None]:
        """Moves within are written together, and told once they are; or none of them is."""
        return self.ledger.transaction()

    def admit(self, group: RolloutGroup, step: int) -> None:
        """A prompt left the source while a version with `step` train steps was current; a slot is charged."""
        with self.transaction():
            self.ledger.add(group, step)
            self._tell(GroupTaken(group.group_id, group.prompt.prompt_id, step))

    def start(self, group_id: str) -> None:
        with self.transaction():
            self._move(group_id, GroupEvent.START)

    def cut(self, group_id: str) -> None:
        """Its requests have ended at a token boundary. What was journalled is what it has."""
        with self.transaction():
            self._move(group_id, GroupEvent.CUT)
            self._tell(GroupCut(group_id, self.ledger.token_count(group_id)))

    def resume(self, group: RolloutGroup) -> None:
        """It goes on from its tokens."""
        name, begun = group.group_id, sum(t.partial and len(t.response_ids) > 0 for t in group.trajectories)
        with self.transaction():
            self._move(name, GroupEvent.RESUME)
            self._tell(GroupResumed(name, self.ledger.token_count(name), begun))

    def complete(self, group: RolloutGroup) -> None:
        """All members are generated and scored; they are stored."""
        with self.transaction():
            self._move(group.group_id, GroupEvent.COMPLETE)
            blobs = self.ledger.store(group)
            self._tell(completed(group, _digest(blobs)))

    def take(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """The groups are the batch of this step, in this order."""
        with self.transaction():
            for group in groups:
                self._move(group.group_id, GroupEvent.TAKE, step)
            self.ledger.put_batch(step, [group.group_id for group in groups])

    def give_back(self, group_id: str) -> None:
        """Its batch does not train: it is complete, and waits again."""
        with self.transaction():
            self._move(group_id, GroupEvent.RETURN)

    def train(self, trained: Sequence[GroupTrained]) -> None:
        """These groups were trained: what is told of each."""
        with self.transaction():
            for event in trained:
                self._move(event.group, GroupEvent.TRAIN, event.step)
            self._tell(*trained)

    def drop(self, group_id: str, reason: str) -> None:
        """It ends without being trained; its tokens are forgotten."""
        with self.transaction():
            self._move(group_id, GroupEvent.DROP, cause=reason)
            self.ledger.forget([group_id])
            self._tell(GroupDropped(group_id, reason))

    def requeue(self, group_id: str, prompt: Prompt, step: int, reason: str) -> RolloutGroup:
        """This attempt ends, its tokens are forgotten; its prompt's next attempt is admitted for `step`."""
        with self.transaction():
            row = self._move(group_id, GroupEvent.REQUEUE, cause=reason)
            self.ledger.forget([group_id])
            again = next_attempt(row, prompt)
            self._tell(GroupRequeued(group_id, reason, again.group_id))
            self.admit(again, step)
        return again

    def roll_back(self, step: int) -> None:
        """On resume with `step` train steps done: groups trained at that step or later, and those of batches that
        did not train, are complete again; those in flight have what was journalled. RunStarted tells it. Raises
        DataError where tokens of such a group are forgotten."""
        with self.transaction():
            for row in self.ledger.trained_since(step):
                if not self.ledger.is_stored(row.group_id):
                    reason = f"the tokens of {row.group_id}, trained at step {row.trained}, are forgotten"
                    raise DataError(
                        Fault("ledger", "", reason, "resume from one of the two newest checkpoints")
                    )
                self._move(row.group_id, GroupEvent.RESTORE, step)
            for row in self.ledger.open_rows():
                if row.state is GroupState.TAKEN:
                    self._move(row.group_id, GroupEvent.RETURN, step)
                elif row.state is GroupState.INFLIGHT:
                    self._move(row.group_id, GroupEvent.CUT, step)

    @property
    def open_groups(self) -> dict[str, GroupState]:
        """What would be lost if it were forgotten now, by ordinal."""
        return {row.group_id: row.state for row in self.ledger.open_rows()}

    @property
    def dropped(self) -> Counter[str]:
        """Groups by the reason of their end. Reads all groups."""
        return self.ledger.causes(GroupState.DROPPED)

    def counts(self) -> dict[str, int]:
        """taken, trained, dropped, requeued, lost: lost is what is neither of these nor still open."""
        counts = self.ledger.counts
        ended = {state.value: counts[state] for state in ENDED}
        taken = counts.total()
        return {"taken": taken, **ended, "lost": taken - sum(ended.values()) - sum(counts[s] for s in OPEN)}

    def _move(
        self, group_id: str, event: GroupEvent, step: int | None = None, cause: str | None = None
    ) -> GroupRow:
        """Within a transaction; the row as it was before."""
        row = self.ledger.row(group_id)
        self.ledger.move(row, event, TABLE.after(row.state, event), step, cause)
        return row

    def _tell(self, *events: Event) -> None:
        def tell() -> None:
            for event in events:
                self._events.emit(event)

        self.ledger.after_commit(tell)


def completed(group: RolloutGroup, digest: str | None = None) -> GroupCompleted:
    """What is told of a group that is complete; `digest` where it is known."""
    members = group.trajectories
    digest = samples_digest(members) if digest is None else digest
    lengths = [[len(t.response_ids), len(t.logprobs), len(t.loss_mask), len(t.spans)] for t in members]
    return GroupCompleted(group.group_id, lengths, versions_of(group), group.rewards, digest)


def versions_of(group: RolloutGroup) -> list[str]:
    """The labels that made any token of the group, sorted."""
    return sorted({label for t in group.trajectories for _, label in t.spans.runs})


def samples_digest(samples: Iterable[Trajectory]) -> str:
    """16 hex digits over token ids (int32) and the exact log-probs (float64) of samples in order, and their
    lengths."""
    return _digest(map(token_bytes, samples))


def _digest(blobs: Iterable[tuple[bytearray, bytearray]]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for tokens, logprobs in blobs:
        digest.update(len(tokens).to_bytes(8, "little") + tokens + logprobs)
    return digest.hexdigest()
