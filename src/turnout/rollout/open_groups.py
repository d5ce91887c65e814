"""The groups that are open, and the slots: who holds one, who goes on next, who may be taken. Pure.

A group holds a slot from its admission until the version that was made from it is committed, or it is dropped.
Owns that count, the order (turnout.rollout.buffer) and the two queues of groups that wait for their turn. Promises:
a group that was cut goes on before any other begins; one that begins anew has the slot and the place of its earlier
attempt; a step that lacks groups holds their slots all the same (docs/staleness.md).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

from turnout.core.types import RolloutGroup
from turnout.rollout.buffer import WindowBuffer


class OpenGroups:
    """`charged` slots are taken. A group is here, by its id, from `admit` until `take` or `leave`."""

    def __init__(self, window: int, version: int) -> None:
        """`version`: train steps in the version that is current."""
        self.order, self.version = WindowBuffer(window), version
        self.charged = 0
        self._groups: dict[str, RolloutGroup] = {}
        self._cut: OrderedDict[str, RolloutGroup] = OrderedDict()
        self._begin: deque[RolloutGroup] = deque()  # admitted, not yet started
        self._uncommitted: deque[tuple[int, int]] = deque()  # (step, slots that it holds)

    def __len__(self) -> int:
        return len(self.order)

    @property
    def wait(self) -> int:
        """How many wait for their turn, cut or not yet started."""
        return len(self._cut) + len(self._begin)

    def admit(self, group: RolloutGroup) -> None:
        """A prompt of the source, or what a resume brings back: it takes a slot."""
        self._enter(group)
        self.charged += 1

    def again(self, key: str, again: RolloutGroup) -> None:
        """The next attempt of a group that is here or in hand: it waits for its turn to begin."""
        if self._groups.pop(key, None) is not None:
            self.order.remove(key)
        self._enter(again)
        self._begin.append(again)

    def _enter(self, group: RolloutGroup) -> None:
        self._groups[group.group_id] = group
        self.order.admit(group.group_id, group.ordinal)

    def begin_later(self, group: RolloutGroup) -> None:
        """It waits for its turn, without tokens."""
        self._begin.append(group)

    def cut(self, group: RolloutGroup) -> None:
        """It waits for its turn, with what it has."""
        self._groups[group.group_id] = self._cut[group.group_id] = group

    @property
    def cut_keys(self) -> list[str]:
        """Those that wait with what they have, in the order in which they were cut."""
        return list(self._cut)

    def next_cut(self) -> RolloutGroup | None:
        """The group that was cut first; it goes on now."""
        return self._cut.popitem(last=False)[1] if self._cut else None

    def next_begin(self) -> RolloutGroup | None:
        """The next one that was admitted and not started; it begins now."""
        return self._begin.popleft() if self._begin else None

    def replace(self, group: RolloutGroup) -> None:
        """What became of it."""
        self._groups[group.group_id] = group

    def leave(self, key: str) -> None:
        """It ends, or is kept aside, without being taken: its slot is free."""
        del self._groups[key]
        self._cut.pop(key, None)
        self.order.remove(key)
        self.charged -= 1

    def take(self, keys: Iterable[str]) -> list[RolloutGroup]:
        """Complete groups leave the order, and keep their slots."""
        keys = list(keys)
        self.order.take_these(keys)
        return [self._groups.pop(key) for key in keys]

    def end_step(self, step: int, taken: int, per_step: int) -> None:
        """So many groups are the batch of the step; it holds `per_step` slots where they are fewer."""
        self.charged += max(0, per_step - taken)
        self._uncommitted.append((step, max(per_step, taken)))

    def committed(self, steps_done: int) -> None:
        """A version with all train steps before `steps_done` in it is current."""
        self.version = steps_done
        while self._uncommitted and self._uncommitted[0][0] < steps_done:
            self.charged -= self._uncommitted.popleft()[1]

    def told(self) -> str:
        """How many there are, for people."""
        return f"{self.order.complete_count} complete, {len(self._cut)} cut, {self.charged}"
