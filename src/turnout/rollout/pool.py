"""The rollouts of a run, from prompt to completed group: they go on for as long as slots are free.

Owns what is asked of them: groups for a step, nothing in flight, a stop. Promises: at most `slots` groups are
admitted and not yet part of a committed version (but for those that a filter keeps aside); a group that is dropped
gives its slot back at once and is replaced by one new prompt, never by a wave; `take` ends with groups, with the
reason why there are fewer, or with an error: it never waits for what cannot come.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from turnout.core.errors import InvariantBroken, RunStopped
from turnout.core.types import RolloutGroup
from turnout.core.waits import ENGINES, UPDATE, Wait
from turnout.rollout.demand import Demand
from turnout.rollout.filters import BEST_OF_OTHERS
from turnout.rollout.group_machine import GroupState
from turnout.rollout.pool_plan import NO_DATA, SURPLUS, PoolPlan, Ports, Taken
from turnout.rollout.returning import Released, Returning, masked
from turnout.rollout.staleness import Fate
from turnout.rollout.workers import Workers

log = logging.getLogger(__name__)


class RolloutPool:
    """See the module. Every change of a group's state happens on the event loop, between two awaits."""

    def __init__(self, ports: Ports, plan: PoolPlan, first_step: int = 0) -> None:
        self._ports, self.plan = ports, plan
        self._demand = Demand(plan, first_step)
        self._workers = Workers(ports, plan, self._demand, self.changed)
        self._open = self._workers.open
        self._stopping = False
        self._news = asyncio.Event()
        self._returning = Returning()
        self._next: list[str] = []  # the next batch, where the rest was dropped before the weights changed

    def restore(self, returning: Returning, step: int) -> None:
        """Before anything else: takes in what a resume at this step brings back; each goes on when its version is
        committed again."""
        self._returning, self._demand.step, self._open.version = returning, step, step
        for one in returning.groups:
            self._open.admit(one.group)
        for ordinal in returning.passed:
            self._open.order.pass_by(ordinal)

    @property
    def step(self) -> int:
        """The step for which groups are taken now."""
        return self._demand.step

    @property
    def in_flight(self) -> int:
        return len(self._workers)

    @property
    def held(self) -> tuple[int, int, int]:
        """Groups in flight, groups complete and not taken, slots."""
        return self.in_flight, self._open.order.complete_count, self.plan.slots

    def stop(self) -> None:
        """Nothing is admitted any more (in deterministic mode: from the next commit on), and whoever takes groups
        gets RunStopped. What is in flight goes on until `close`, which keeps its tokens."""
        self._stopping = True
        self._workers.held |= not self.plan.deterministic
        self.changed()

    async def take(self, count: int) -> Taken:
        """The oldest `count` groups, which are then in hand, for the batch of the current step. Raises TrainError
        where too many failed or all were filtered, the update's error where slots are never freed any more."""
        end = self._ports.clock.now() + self.plan.deadline_s
        keys, more, why = await self._chosen(count, end)
        while why is None:  # a round was skipped
            keys, more, why = await self._chosen(count, end)
        groups = [*self._open.take(keys), *more]
        self._demand.in_hand += len(groups)
        if self.plan.surplus and not self.plan.beside and len(groups) == count:
            await self._cut_surplus(0)
        failed, filtered = self._demand.failed.total(), self._demand.filters.total
        return Taken(groups, failed, filtered, why, self._ports.source.exhausted and not len(self._open))

    async def _chosen(self, count: int, end: float) -> tuple[list[str], tuple[RolloutGroup, ...], str | None]:
        """The ids of the groups to take, groups besides that the filter had rejected, and why they are fewer than
        `count`; None: the round was skipped."""
        self._workers.held = self._stopping
        self._workers.pump()
        while (keys := self._choice(count)) is None:
            self._check_take()
            if self._workers.idle and self._returning.waits and not self._ports.updating():
                self._released(self._returning.first())
                self._workers.pump()
                continue
            await self._told_news(f"the groups of step {self.step}", end)
        self._check_take()
        if len(keys) == count:
            return keys, (), ""
        if not (demand := self._demand).filters.full:
            return keys, (), NO_DATA
        ended = demand.filters.settle(self.step, demand.in_hand + len(keys), demand.in_hand + count)
        log.warning("step %d: %s", self.step, ended.why)
        for group in ended.dropped:
            self._ports.book.drop(group.group_id, BEST_OF_OTHERS)
        self._open.charged += len(ended.taken)
        if ended.skip:
            return keys, (), None
        return keys, ended.taken, "" if len(keys) + len(ended.taken) == count else ended.why

    def _choice(self, count: int) -> list[str] | None:
        """What to take: the batch of this step as it was recorded before a resume, what was kept for it when the
        rest was dropped, or the oldest that are ready. None: not yet."""
        order = self._open.order
        recorded = self._returning.batch(self.step) or self._next
        if recorded and not self._demand.in_hand:
            if order.complete_all(recorded):
                return list(recorded)
            return [] if self._no_more() else None
        return order.ready(count) if order.ready_count >= count or self._no_more() else None

    def _no_more(self) -> bool:
        """Whether nothing more will come for this step; raises where it should."""
        if not self._workers.idle:
            return self._workers.fault is not None
        waits = self._returning.waits
        if not waits and (self._workers.wanted <= 0 or self._ports.source.exhausted):
            return True
        # what holds the slots are groups that trained or are in hand: only a commit frees them
        if self._ports.updating():
            return False
        failure = self._ports.failure()
        if failure is not None:
            raise failure
        if waits:
            return False
        raise InvariantBroken(f"step {self.step} waits for slots that nothing frees: {self._told()}")

    def end_step(self) -> None:
        """The groups in hand are the batch of this step; the next `take` is for the next one. The step keeps its
        slots, those of groups that it lacks too, until the version made from it is committed (staleness.md)."""
        self._open.end_step(self.step, self._demand.in_hand, self.plan.per_step)
        self._next = []
        for group in self._demand.next_step():
            self._ports.book.drop(group.group_id, BEST_OF_OTHERS)
        self._workers.pump()

    def send_back(self, group: RolloutGroup, cause: str) -> None:
        """A group in hand is not trained: its prompt begins anew, with the slot and the place that it has."""
        self._begin_anew(group, cause)
        self._demand.in_hand -= 1
        self._workers.pump()

    def _begin_anew(self, group: RolloutGroup, cause: str) -> None:
        key = group.group_id
        self._open.again(key, self._ports.book.requeue(key, group.prompt, self.step, cause))

    def drop(self, group: RolloutGroup, reason: str) -> None:
        """A group in hand ends without being trained."""
        self._ports.book.drop(group.group_id, reason)
        self._demand.in_hand -= 1
        self._open.charged -= 1
        self._workers.pump()

    def published(self, steps_done: int, root: str) -> None:
        """The trainer has made these weights; a version of them is on its way, and may fail."""
        self._returning.made(steps_done, root)

    def remade(self, steps_done: int, root: str) -> None:
        """The trainer has made these weights again, of which no version could be published."""
        self._ports.book.ledger.remade_versions(steps_done, root)
        self._returning.made(steps_done, root)

    def committed(self, steps_done: int, root: str = "") -> None:
        """A version with all train steps before `steps_done` in it is current; `root` is its digest."""
        self._open.committed(steps_done)
        self._workers.held = self._stopping
        self.release(steps_done, root)
        self._workers.pump()
        self.changed()

    def release(self, steps_done: int, root: str) -> None:
        """Groups of a resume that waited for this version go on with what is asked for next."""
        for one in self._returning.committed(steps_done, root):
            self._released(one)

    def _released(self, one: Released) -> None:
        """A group of a resume waits no more. With tokens of weights that came out otherwise it ends, or begins anew
        in its place, or loses these tokens, by the policy."""
        key, policy = one.group.group_id, self._returning.policy
        if not one.foreign or policy is Fate.MASK:
            self._go_on(masked(one.group, one.foreign), one.state)
            return
        reason = f"tokens of {', '.join(sorted(one.foreign))}, which a resume made otherwise"
        self._returning.spoil(key)
        if policy is Fate.REPLAY:
            self._begin_anew(one.group, reason)
        else:
            self._workers.drop(key, reason)

    def _go_on(self, group: RolloutGroup, state: GroupState) -> None:
        if state is GroupState.COMPLETED and self._returning.recorded(group.group_id):
            self._workers.complete(group)
        elif state is GroupState.COMPLETED:
            self._workers.judge(group)
        elif state is GroupState.PARTIAL:
            self._open.cut(group)
        else:
            self._open.begin_later(group)

    def changed(self) -> None:
        """Whoever waits here looks again."""
        self._news.set()

    async def _told_news(self, what: str, end: float) -> None:
        """Waits until something has changed, at most until `end`."""
        self._news.clear()
        left = max(0.001, end - self._ports.clock.now())
        await self._ports.clock.within(left, f"{what} ({self._told()})", self._news.wait())

    def waits(self, who: str, since: float) -> Iterator[Wait]:
        """What the batch of the step, or a drain, waits for: groups, a commit that frees their slots, or engines
        that may be given more."""
        making = set(self._workers.keys)
        needed = self._open.order.oldest(self.plan.per_step + self.plan.window - 1)
        for key in making.intersection(needed) or making:
            yield Wait(who, f"group {key}", "it to be complete", since)
        if not making and self._ports.updating():
            yield Wait(who, UPDATE, f"a commit ({self._told()})", since)
        elif not making:
            yield Wait(who, ENGINES, f"one that groups may be given to ({self._told()})", since)

    async def drain(self) -> None:
        """Waits until nothing is in flight and nothing can be admitted. With over-sampling beside training: until
        the next batch is complete, or no more is to be trained; the rest is cut."""
        end = self._ports.clock.now() + self.plan.deadline_s
        self._workers.pump()
        while self._workers and not self._enough():
            self._workers_fine()
            await self._told_news("rollouts to drain", end)
        self._workers_fine()
        if self.plan.beside and self.plan.surplus:
            await self._cut_surplus(self.plan.per_step)

    def _enough(self) -> bool:
        """Whether what is in flight is surplus."""
        last = self.step == self.plan.steps
        return self.plan.surplus > 0 and (last or self._choice(self.plan.per_step) is not None)

    async def _cut_surplus(self, keep: int) -> None:
        """Cuts what is in flight. Where that ends it, so does it what a resume brought back cut and complete groups
        but the oldest `keep`: they would train a version later than those of their rollout. The `keep` train next,
        before older groups that had no tokens yet."""
        await self.cut()
        if not self.plan.drops_cut:
            return
        complete = self._open.order.complete_keys
        for key in [*self._open.cut_keys, *complete[keep:]]:
            if not self._returning.recorded(key):
                self._workers.drop(key, SURPLUS)
        self._next = complete[:keep] if len(complete) >= keep else []

    async def cut(self) -> None:
        """Stops what is in flight, keeps or drops it; nothing is admitted until the next commit or `take`."""
        await self._workers.cut()

    def admit(self, cut: int) -> None:
        """Cuts so many of the newest groups (none where one that is cut is lost), and starts what may start."""
        self._workers.cut_newest(cut)

    async def close(self) -> None:
        """Ends what is in flight; what it has is in the ledger then."""
        await self._workers.close()

    def _workers_fine(self) -> None:
        if self._workers.fault is not None:
            raise self._workers.fault
        self._demand.check()

    def _check_take(self) -> None:
        self._workers_fine()
        if self._stopping:
            raise RunStopped(f"stopped after {self.step} steps")

    def _told(self) -> str:
        return f"{self.in_flight} groups in flight, {self._open.told()} of {self.plan.slots} slots taken"
