"""The rollouts of a run, from prompt to completed group: they go on for as long as slots are free.

Owns the slots, the groups that are open and the order in which they may be taken. Promises: at most `slots` groups
are admitted and not yet part of a committed version (but for those that a filter keeps aside); a group that is
dropped gives its slot back at once and is replaced by one new prompt, never by a wave; groups that were cut go on
before new prompts are taken; `take` ends with groups, with the reason why there are fewer, or with an error: it
never waits for what cannot come.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque

from turnout.core.errors import InvariantBroken, RunStopped, TrainError, TurnoutError
from turnout.core.types import RolloutGroup
from turnout.rollout.buffer import WindowBuffer
from turnout.rollout.filters import BEST_OF_OTHERS, FilterRound
from turnout.rollout.group_machine import GroupState
from turnout.rollout.in_flight import InFlight
from turnout.rollout.journal import TokenJournal
from turnout.rollout.ledger_rows import group_id_of
from turnout.rollout.pool_plan import NO_DATA, SURPLUS, PoolPlan, Ports, Taken
from turnout.rollout.returning import Released, Returning, masked
from turnout.rollout.staleness import Fate
from turnout.rollout.worker import GroupFailed

log = logging.getLogger(__name__)


class RolloutPool:
    """See the module. Every change of a group's state happens on the event loop, between two awaits."""

    def __init__(self, ports: Ports, plan: PoolPlan, first_step: int = 0) -> None:
        self._ports, self.plan = ports, plan
        self._groups: dict[str, RolloutGroup] = {}  # open and not taken
        self._running = InFlight(self._ended)
        self._partial: OrderedDict[str, RolloutGroup] = OrderedDict()
        self._again: deque[RolloutGroup] = deque()  # admitted again, not yet started
        self._buffer = WindowBuffer(plan.window)
        self._charged = 0
        self._uncommitted: deque[tuple[int, int]] = deque()  # (step, slots that it holds)
        self._step, self._in_hand = first_step, 0
        self._failed: Counter[str] = Counter()
        self._round = FilterRound(plan.limits.filters)
        self._held = self._closing = self._stopping = False
        self._journal = TokenJournal(ports.book.ledger, ports.clock)
        self._fault: BaseException | None = None
        self._news = asyncio.Event()
        self._returning = Returning()

    def restore(self, returning: Returning, step: int) -> None:
        """Before anything else: takes in what a resume at this step brings back; each goes on when its version is
        committed again."""
        self._returning, self._step = returning, step
        for one in returning.groups:
            self._admitted(one.group)
            self._charged += 1
        for ordinal in returning.passed:
            self._buffer.pass_by(ordinal)

    @property
    def step(self) -> int:
        """The step for which groups are taken now."""
        return self._step

    def stop(self) -> None:
        """Nothing is admitted any more, and whoever takes groups gets RunStopped. What is in flight goes on until
        `close`, which keeps its tokens."""
        self._stopping = self._held = True
        self.changed()

    @property
    def in_flight(self) -> int:
        return len(self._running)

    async def take(self, count: int) -> Taken:
        """The oldest `count` groups, which are then in hand, for the batch of the current step. Raises TrainError
        where too many failed or all were filtered, the update's error where slots are never freed any more."""
        end = self._ports.clock.now() + self.plan.deadline_s
        keys, more, why = await self._chosen(count, end)
        while why is None:  # a round was skipped
            keys, more, why = await self._chosen(count, end)
        self._buffer.take_these(keys)
        groups = [*(self._groups.pop(key) for key in keys), *more]
        self._in_hand += len(groups)
        if self.plan.surplus != "goes on" and len(groups) == count:
            await self.cut()
            self._drop_surplus()
        return Taken(groups, self._failed.total(), self._round.total, why, self._is_last())

    async def _chosen(self, count: int, end: float) -> tuple[list[str], tuple[RolloutGroup, ...], str | None]:
        """The ids of the groups to take, groups besides that the filter had rejected, and why they are fewer than
        `count`; None: the round was skipped."""
        self._held = self._stopping
        self._pump()
        while (keys := self._choice(count)) is None:
            self._check_take()
            if self._idle and self._returning.waits and not self._ports.updating():
                self._released(self._returning.first())
                self._pump()
                continue
            self._news.clear()
            what = f"the groups of step {self._step} ({self._told()})"
            await self._ports.clock.within(max(0.001, end - self._ports.clock.now()), what, self._news.wait())
        self._check_take()
        if len(keys) == count:
            return keys, (), ""
        if not self._round.full:
            return keys, (), NO_DATA
        ended = self._round.settle(self._step, self._in_hand + len(keys), self._in_hand + count)
        log.warning("step %d: %s", self._step, ended.why)
        for group in ended.dropped:
            self._ports.book.drop(group.group_id, BEST_OF_OTHERS)
        self._charged += len(ended.taken)
        if ended.skip:
            return keys, (), None
        return keys, ended.taken, "" if len(keys) + len(ended.taken) == count else ended.why

    def end_step(self) -> None:
        """The groups in hand are the batch of this step; the next `take` is for the next one. The step keeps its
        slots, those of groups that it lacks too, until the version made from it is committed (staleness.md)."""
        self._charged += max(0, self.plan.per_step - self._in_hand)
        self._uncommitted.append((self._step, max(self.plan.per_step, self._in_hand)))
        self._step += 1
        self._in_hand = 0
        self._failed.clear()
        for group in self._round.begin():
            self._ports.book.drop(group.group_id, BEST_OF_OTHERS)
        self._pump()

    def send_back(self, group: RolloutGroup, cause: str) -> None:
        """A group in hand is not trained: its prompt begins anew, with the slot and the place that it has."""
        again = self._ports.book.requeue(group.group_id, group.prompt, self._step, cause)
        self._in_hand -= 1
        self._admitted(again)
        self._again.append(again)
        self._pump()

    def drop(self, group: RolloutGroup, reason: str) -> None:
        """A group in hand ends without being trained."""
        self._ports.book.drop(group.group_id, reason)
        self._in_hand -= 1
        self._charged -= 1
        self._pump()

    def committed(self, steps_done: int, root: str = "") -> None:
        """A version with all train steps before `steps_done` in it is current; `root` is its digest."""
        while self._uncommitted and self._uncommitted[0][0] < steps_done:
            self._charged -= self._uncommitted.popleft()[1]
        self._held = self._stopping
        self.release(steps_done, root)
        self._pump()
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
            again = self._ports.book.requeue(key, one.group.prompt, self._step, reason)
            self._buffer.remove(key)
            del self._groups[key]
            self._admitted(again)
            self._again.append(again)
        else:
            self._drop(key, reason)

    def _go_on(self, group: RolloutGroup, state: GroupState) -> None:
        key = group.group_id
        self._groups[key] = group
        if state is GroupState.COMPLETED and self._returning.recorded(key):
            self._buffer.complete(key)
        elif state is GroupState.COMPLETED:
            self._judge(group)
        elif state is GroupState.PARTIAL:
            self._partial[key] = group
        else:
            self._again.append(group)

    def changed(self) -> None:
        """Whoever waits here looks again."""
        self._news.set()

    async def drain(self) -> None:
        """Waits until nothing is in flight and nothing can be admitted."""
        end = self._ports.clock.now() + self.plan.deadline_s
        self._pump()
        while self._running:
            self._check()
            self._news.clear()
            left = max(0.001, end - self._ports.clock.now())
            await self._ports.clock.within(left, f"rollouts to drain ({self._told()})", self._news.wait())
        self._check()

    async def cut(self) -> None:
        """Stops what is in flight, keeps or drops it (`surplus`); nothing is admitted until the next commit, or
        until the next groups are asked for."""
        self._held = True
        await self._running.cut()

    def admit(self, cut: int) -> None:
        """Cuts so many of the newest groups (none where one that is cut is lost), and starts what may start."""
        self._running.cut_newest(cut if self.plan.surplus != "dropped" else 0)
        self._pump()

    async def close(self) -> None:
        """Ends what is in flight; what it has is in the ledger then."""
        self._held = self._closing = True
        await self._running.close()
        await self._journal.close()

    def _pump(self) -> None:
        """Admits what may be admitted."""
        while not self._held and self._fault is None and self._may_start():
            if self._partial:
                key, group = self._partial.popitem(last=False)
                self._ports.book.resume(key)
            elif self._again:
                group = self._again.popleft()
                self._ports.book.start(group.group_id)
            elif (fresh := self._fresh()) is not None:
                group = fresh
                with self._ports.book.transaction():
                    self._ports.book.admit(group, self._step)
                    self._ports.book.start(group.group_id)
                self._charged += 1
                self._admitted(group)
            else:
                return
            self._run(group)

    def _admitted(self, group: RolloutGroup) -> None:
        self._groups[group.group_id] = group
        self._buffer.admit(group.group_id, group.ordinal)

    def _run(self, group: RolloutGroup) -> None:
        keeper = self._journal.keeper(group)
        make, sampling, seeds = self._ports.generator.group, self.plan.sampling, self._ports.seeds
        self._running.begin(group, lambda cut: make(group, sampling, seeds, keeper, cut))

    def _may_start(self) -> bool:
        admission, ahead = self._ports.admission, 0 if self._partial or self._again else self._charged
        return admission is None or admission.may_start(len(self._running), ahead)

    def _fresh(self) -> RolloutGroup | None:
        """The next prompt, where there is a slot and a use for it."""
        if self._charged >= self.plan.slots or self._wanted() <= 0:
            return None
        for ordinal, prompt in self._ports.source.take(1):
            return RolloutGroup(group_id_of(ordinal, 0), ordinal, 0, prompt)
        return None

    def _wanted(self) -> int:
        """How many more groups the steps that are left can use."""
        plan = self.plan
        if self._round.full:
            return 0
        left = plan.slots if plan.steps is None else (plan.steps - self._step) * plan.per_step - self._in_hand
        if plan.surplus != "goes on" and left > 0:
            left = plan.slots
        return left - len(self._buffer)

    def _ended(self, group: RolloutGroup, task: asyncio.Task[RolloutGroup]) -> None:
        key = group.group_id
        if task.cancelled():
            self._cut_one(group)
        elif (fault := task.exception()) is None:
            try:
                self._take_in(key, task.result())
            except TurnoutError as broken:  # nobody waits for this call: whoever takes next is told
                self._fault = broken
        elif isinstance(fault, GroupFailed):
            self._failed[str(fault)] += 1
            self._drop(key, str(fault))
        else:
            self._fault = fault
        self._pump()
        self.changed()

    def _take_in(self, key: str, made: RolloutGroup) -> None:
        if not isinstance(made, RolloutGroup):  # else the batch would wait for it for ever
            raise InvariantBroken(f"group {key} ended as {made!r}")
        (self._cut_one if made.partial else self._complete)(made)

    def _complete(self, group: RolloutGroup) -> None:
        self._journal.forget(group.group_id)
        self._ports.book.complete(group)
        self._groups[group.group_id] = group
        self._judge(group)

    def _judge(self, group: RolloutGroup) -> None:
        """A completed group may be taken, or leaves slot and order: dropped, or kept aside until the round ends."""
        passed, gone = self._round.judge(group, self.plan.per_step)
        if passed:
            self._buffer.complete(group.group_id)
            return
        del self._groups[group.group_id]
        self._buffer.remove(group.group_id)
        self._charged -= 1
        for one, why in gone:
            self._ports.book.drop(one.group_id, why)

    def _cut_one(self, group: RolloutGroup) -> None:
        if self.plan.surplus == "dropped" and not self._closing:
            self._drop(group.group_id, SURPLUS)
        else:
            self._journal.write()
            self._ports.book.cut(group.group_id)
            self._groups[group.group_id] = group
            self._partial[group.group_id] = group

    def _drop_surplus(self) -> None:
        """Ends the complete groups beside the batch: in the next one they would be a step old."""
        if self.plan.surplus == "dropped":
            for key in self._buffer.complete_keys:
                self._drop(key, SURPLUS)

    def _drop(self, key: str, reason: str) -> None:
        self._journal.forget(key)
        self._ports.book.drop(key, reason)
        del self._groups[key]
        self._buffer.remove(key)
        self._charged -= 1

    def _choice(self, count: int) -> list[str] | None:
        """What to take: the batch of this step as it was recorded before a resume, or the oldest that are ready.
        None: not yet."""
        recorded = None if self._in_hand else self._returning.batch(self._step)
        if recorded is not None:
            if self._buffer.complete_all(recorded):
                return list(recorded)
            return [] if self._no_more() else None
        if self._buffer.ready_count >= count or self._no_more():
            return self._buffer.ready(count)
        return None

    def _no_more(self) -> bool:
        """Whether nothing more will come for this step; raises where it should."""
        if not self._idle:
            return self._fault is not None
        waits = self._returning.waits
        if not waits and (self._wanted() <= 0 or self._ports.source.exhausted):
            return True
        # what holds the slots are groups that trained or are in hand: only a commit frees them
        if self._ports.updating():
            return False
        failure = self._ports.failure()
        if failure is not None:
            raise failure
        if waits:
            return False
        raise InvariantBroken(f"step {self._step} waits for slots that nothing frees: {self._told()}")

    @property
    def _idle(self) -> bool:
        """Whether nothing is in flight though something might be."""
        return not self._running and self._fault is None and not self._held and self._may_start()

    def _check(self) -> None:
        if self._fault is not None:
            raise self._fault
        limits = self.plan.limits
        if self._failed.total() > limits.max_failed:
            reason, times = self._failed.most_common(1)[0]
            raise TrainError(
                f"rollout {self._step}: {self._failed.total()} groups failed (--max-failed-groups "
                f"{limits.max_failed}), {times} of them with: {reason}"
            )

    def _check_take(self) -> None:
        self._check()
        if self._stopping:
            raise RunStopped(f"stopped after {self._step} steps")

    def _is_last(self) -> bool:
        return self._ports.source.exhausted and not len(self._buffer)

    def _told(self) -> str:
        return (
            f"{len(self._running)} groups in flight, {self._buffer.complete_count} complete, "
            f"{len(self._partial)} cut, {self._charged} of {self.plan.slots} slots taken"
        )
