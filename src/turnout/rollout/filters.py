"""Which completed groups may train, and what a round does when too few of them may. Pure.

A round is what is sampled for one batch: it begins when the batch before was taken. Owns the count of what the
filter rejected in it and, with `best`, the groups kept aside. Promises: a group is rejected for a reason that
does not depend on rounding (the largest reward equals the smallest, compared exactly: the standard deviation of
[0.1] * 7 is not 0 in floating point); a round ends after `limit` rejections, never with an endless loop; the
message of its end tells the accept rate and the commonest reason.

`settle` is called when a round has reached its limit and nothing of it is in flight any more, so groups kept
aside take back the slots that they left, and the lead of `rollout.slots` holds for them as for the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from turnout.core.errors import NothingToTrain, TrainError
from turnout.core.imports import load_function
from turnout.core.types import RolloutGroup

Action = Literal["train", "best", "skip", "stop"]
Filter = Callable[[RolloutGroup], str | None]
FLAG, REJECTED = "--dynamic-sampling-filter-path", "rejected by the filter"
NO_VARIANCE, NOT_A_NUMBER, BEST_OF_OTHERS = (
    "all rewards equal",
    "a reward is nan",
    "not among the best rejected",
)


def no_variance(rewards: Sequence[float]) -> str | None:
    """Why a group with these rewards says nothing about which answer is better; None where it does. A group of
    one (or none) has no variance; NaN, which equals nothing, is a reason of its own."""
    if any(math.isnan(reward) for reward in rewards):
        return NOT_A_NUMBER
    return NO_VARIANCE if not rewards or max(rewards) == min(rewards) else None


def of_no_variance(group: RolloutGroup) -> str | None:
    """The filter of --dynamic-sampling."""
    return no_variance(group.rewards)


def load_filter(text: str) -> Filter:
    """A user's filter by import path: called with a group it gives True to keep it, False or a reason to drop it.
    Raises ConfigError; the filter raises TrainError for what the function raises, or gives besides."""
    function = load_function(FLAG, text)

    def reject(group: RolloutGroup) -> str | None:
        try:
            verdict = function(group)
        except Exception as fault:
            raise TrainError(f"{FLAG} {text} failed for group {group.group_id}: {fault!r}") from fault
        if not isinstance(verdict, bool | str):
            raise TrainError(f"{FLAG} {text} gave {verdict!r}: neither True, nor False, nor a reason")
        return None if verdict is True else verdict or REJECTED

    return reject


@dataclass(frozen=True)
class FilterPlan:
    """`reject` gives the reason against a group, or None (dynamic sampling off: None for all). `limit` is how
    many rejections end a round, `otherwise` what happens then, `skips` how many rounds in a row may be skipped."""

    reject: Filter = lambda _: None
    limit: int = 1
    otherwise: Action = "train"
    skips: int = 0


@dataclass(frozen=True)
class Settlement:
    """How a round at its limit ends: `taken` go into the batch besides those that passed (none of which means
    that the batch is what passed), `dropped` end; `skip` begins the next round with what passed. `why` is for
    people."""

    taken: tuple[RolloutGroup, ...] = ()
    dropped: tuple[RolloutGroup, ...] = ()
    skip: bool = False
    why: str = ""


@dataclass
class FilterRound:
    """The rejections since the last batch: `rejected` since the last skip, `total` all. `begin` starts the next
    round."""

    plan: FilterPlan
    accepted: int = 0
    rejected: Counter[str] = field(default_factory=Counter[str])
    skipped: int = 0
    total: int = 0
    _aside: list[RolloutGroup] = field(default_factory=list[RolloutGroup])

    @property
    def full(self) -> bool:
        """Whether no more prompts are to be tried in this round."""
        return self.rejected.total() >= self.plan.limit

    @property
    def aside(self) -> tuple[RolloutGroup, ...]:
        """Rejected groups that are still COMPLETED, best first."""
        return tuple(self._aside)

    def judge(self, group: RolloutGroup, wanted: int) -> tuple[bool, list[tuple[RolloutGroup, str]]]:
        """Whether a completed group passed, and the groups to drop now with their reasons: a rejected one, or
        with `best` the least of more than `wanted` that are kept aside."""
        reason = self.plan.reject(group)
        if reason is None:
            self.accepted += 1
            return True, []
        self.rejected[reason] += 1
        self.total += 1
        if self.plan.otherwise != "best" or reason == NOT_A_NUMBER:
            return False, [(group, reason)]
        self._aside = sorted([*self._aside, group], key=_rank)
        over, self._aside = self._aside[wanted:], self._aside[:wanted]
        return False, [(one, reason if one is group else BEST_OF_OTHERS) for one in over]

    def begin(self) -> tuple[RolloutGroup, ...]:
        """A batch was taken: counts start anew. Returns the groups kept aside, which are to be dropped."""
        left, self._aside = tuple(self._aside), []
        self.accepted, self.rejected, self.skipped, self.total = 0, Counter(), 0, 0
        return left

    def settle(self, step: int, passed: int, wanted: int) -> Settlement:
        """What a full round with `passed` groups for a batch of `wanted` comes to. Raises NothingToTrain where
        the run is to stop, or nothing can be trained."""
        told = self.told(passed, wanted)
        if self.plan.otherwise == "skip":
            if self.skipped >= self.plan.skips:
                raise NothingToTrain(f"rollout {step}: {told}; {self.skipped} rounds in a row were skipped")
            self.skipped += 1
            self.accepted, self.rejected = 0, Counter()
            return Settlement(skip=True, why=told)
        if self.plan.otherwise == "stop":
            raise NothingToTrain(f"rollout {step}: {told} (--on-all-filtered stop)")
        room = max(0, wanted - passed)
        taken, dropped, self._aside = tuple(self._aside[:room]), tuple(self._aside[room:]), []
        if passed + len(taken) == 0:
            raise NothingToTrain(
                f"rollout {step}: {told}: the task is too easy or too hard for this model, or the reward does not "
                "tell answers apart (--dynamic-sampling-max-waves)"
            )
        return Settlement(taken, dropped, why=told)

    def told(self, passed: int, wanted: int) -> str:
        """The state of the round in one line."""
        judged = self.accepted + self.rejected.total()
        share = f"{self.accepted} of {judged} groups passed the filter"
        if not self.rejected:
            return share
        reason, times = self.rejected.most_common(1)[0]
        return f"{passed} of {wanted} groups of the batch: {share}, {times} were dropped: {reason}"


def _rank(group: RolloutGroup) -> tuple[float, int]:
    """The widest spread of rewards first, then the order of the source."""
    return (min(group.rewards) - max(group.rewards) if group.rewards else 0.0, group.ordinal)
