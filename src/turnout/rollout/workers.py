"""The long-lived workers: each open group is made by a task of its own, for as long as slots are free.

Owns the tasks and the token journal. Promises: a group begins only on a slot; what was cut goes on before new
prompts are taken; the end of a group is written and accounted for once, however it ended: complete, cut, dropped
with its slot freed at once; a fault that is no group's stops admission and is kept for whoever takes groups next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from turnout.core.errors import InvariantBroken, TurnoutError
from turnout.core.types import RolloutGroup
from turnout.rollout.demand import Demand
from turnout.rollout.in_flight import Ends, InFlight, Making
from turnout.rollout.journal import TokenJournal
from turnout.rollout.ledger_rows import group_id_of
from turnout.rollout.open_groups import OpenGroups
from turnout.rollout.pool_plan import SURPLUS, PoolPlan, Ports
from turnout.rollout.worker import GroupFailed


class Workers:
    """`held`: nothing starts. `fault` is what ended a task that was no group's own failure. `changed` is called
    whenever a group has ended."""

    def __init__(self, ports: Ports, plan: PoolPlan, demand: Demand, changed: Callable[[], None]) -> None:
        self._ports, self._plan, self._demand, self._changed = ports, plan, demand, changed
        self.open = OpenGroups(plan.window, demand.step)
        self.held = self._closing = False
        self.fault: BaseException | None = None
        self._running = InFlight(self._ended)
        self._journal = TokenJournal(ports.book.ledger, ports.clock, self._broke)

    def __len__(self) -> int:
        """Groups in flight."""
        return len(self._running)

    @property
    def keys(self) -> list[str]:
        """The groups that are being made."""
        return self._running.keys

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight though something might be."""
        return not self._running and self._may_start()

    @property
    def wanted(self) -> int:
        """How many more groups the steps that are left can use."""
        complete = self.open.order.complete_count
        return self._demand.wanted(complete, len(self.open) - complete)

    def pump(self) -> None:
        """Starts what may be started; written as one."""
        if self._may_start() and (self.open.wait or self._slot_free()):
            with self._ports.book.transaction():
                while self._may_start() and self._start_next():
                    pass

    def _start_next(self) -> bool:
        """Whether there was a group to start."""
        if (group := self.open.next_cut()) is not None:
            self._ports.book.resume(group)
        elif (group := self.open.next_begin()) is not None:
            self._ports.book.start(group.group_id)
        elif (group := self._fresh()) is not None:
            self._ports.book.admit(group, self.open.version)
            self._ports.book.start(group.group_id)
            self.open.admit(group)
        else:
            return False
        self._run(group)
        return True

    def _run(self, group: RolloutGroup) -> None:
        keeper = self._journal.keeper(group)
        make, sampling, seeds = self._ports.generator.group, self._plan.sampling, self._ports.seeds
        self._running.begin(group, lambda cut: make(group, sampling, seeds, keeper, cut))

    def _may_start(self) -> bool:
        return not self.held and self.fault is None and self._room()

    def _slot_free(self) -> bool:
        """Whether there is a slot for a new prompt, and a use for it."""
        return self.open.charged < self._plan.slots and self.wanted > 0

    def _room(self) -> bool:
        admission, ahead = self._ports.admission, 0 if self.open.wait else self.open.charged
        return admission is None or admission.may_start(len(self._running), ahead)

    def _fresh(self) -> RolloutGroup | None:
        """The next prompt, where there is a slot and a use for it."""
        if not self._slot_free():
            return None
        for ordinal, prompt in self._ports.source.take(1):
            return RolloutGroup(group_id_of(ordinal, 0), ordinal, 0, prompt)
        return None

    def _ended(self, ends: Ends) -> None:
        try:
            with self._ports.book.transaction():
                for group, task in ends:
                    self._end(group, task)
                    self.pump()
        except TurnoutError as broken:
            self._broke(broken)
        else:
            self._changed()

    def _broke(self, fault: TurnoutError) -> None:
        """Nobody waits for the call that failed: whoever takes next is told."""
        if self.fault is None:
            self.fault = fault
        self._changed()

    def _end(self, group: RolloutGroup, task: Making) -> None:
        key = group.group_id
        if task.cancelled():
            self._cut_one(group, known=False)
        elif (fault := task.exception()) is None:
            self._take_in(key, task.result())
        elif isinstance(fault, GroupFailed):
            self._demand.failed[str(fault)] += 1
            self.drop(key, str(fault))
        else:
            self.fault = fault

    def _take_in(self, key: str, made: RolloutGroup) -> None:
        if not isinstance(made, RolloutGroup):  # else the batch would wait for it for ever
            raise InvariantBroken(f"group {key} ended as {made!r}")
        if made.partial:
            self._cut_one(made, known=len(made.trajectories) == self._plan.sampling.samples)
            return
        self._journal.forget(key)
        self._ports.book.complete(made)
        self.judge(made)

    def judge(self, group: RolloutGroup) -> None:
        """A completed group may be taken, or leaves slot and order: dropped, or kept aside until the round ends."""
        key = group.group_id
        passed, gone = self._demand.filters.judge(group, self._plan.per_step)
        if passed:
            self.complete(group)
            return
        self.open.leave(key)
        for one, why in gone:
            self._ports.book.drop(one.group_id, why)

    def complete(self, group: RolloutGroup) -> None:
        """It may be taken."""
        self.open.replace(group)
        self.open.order.complete(group.group_id)

    def _cut_one(self, group: RolloutGroup, known: bool) -> None:
        """`known`: its members are there, each as it was cut; else the ledger has more: of a member that failed, or
        all that a task had made that was cancelled."""
        if self._plan.drops_cut and not self._closing:
            self.drop(group.group_id, SURPLUS)
        else:
            book, name = self._ports.book, group.group_id
            self._journal.write()
            book.cut(name)
            if not known and not self._closing:
                group = replace(group, trajectories=tuple(book.ledger.members(name).values()))
            self.open.cut(group)

    def drop(self, key: str, reason: str) -> None:
        """An open group ends; its slot is free."""
        self._journal.forget(key)
        self._ports.book.drop(key, reason)
        self.open.leave(key)

    async def cut(self) -> None:
        """Ends what is in flight at a token boundary; nothing starts until somebody releases it."""
        self.held = True
        await self._running.cut()

    def cut_newest(self, count: int) -> None:
        """Cuts so many of the newest groups (none where one that is cut is lost), and starts what may start."""
        self._running.cut_newest(0 if self._plan.drops_cut else count)
        self.pump()

    async def close(self) -> None:
        """Ends what is in flight; what it has is in the ledger then."""
        self.held = self._closing = True
        await self._running.close()
        await self._journal.close()
