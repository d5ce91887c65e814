"""The lag gate: how old a batch is, and whether it may train.

Owns the train step at which each version was exported, as far as this run published it, and asks
turnout.rollout.staleness for the verdicts. Promises: what passes `check` holds no token over --max-staleness and
none of a version that never became current; what the schedule itself rules out, a lag above its lead, raises in
`judge` instead of being mended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from turnout.core.errors import InvariantBroken
from turnout.core.events import STALE
from turnout.core.types import RolloutGroup, Trajectory
from turnout.core.version import WeightVersion
from turnout.rollout.ledger_rows import VersionRow
from turnout.rollout.returning import ABANDONED, MADE, STANDING
from turnout.rollout.staleness import (
    NEVER,
    StalenessPolicy,
    Tokens,
    Verdict,
    greatest_lag,
    judge,
    token_lags,
    too_old,
    trained_lags,
)


@dataclass
class LagGate:
    """`lead` is the greatest lag that the schedule can bring (None: it sets no bound, as with partial rollouts).
    `exported_at` holds None for a version that is published and not current, or never was."""

    policy: StalenessPolicy
    lead: int | None = None
    exported_at: dict[str, int | None] = field(default_factory=dict[str, int | None])
    abandoned: dict[tuple[int, str], set[str]] = field(default_factory=dict[tuple[int, str], set[str]])

    def restore(self, versions: Collection[VersionRow]) -> None:
        """What a resume knows of versions of earlier incarnations: an abandoned one counts as committed once the
        same weights are made again at its step, and published."""
        for row in versions:
            self.exported_at[row.label] = row.step if row.state in STANDING else None
            if row.state == ABANDONED:
                self.abandoned.setdefault((row.step, row.root), set()).add(row.label)
        for row in versions:
            if row.state in MADE:
                self._again(row.step, row.root)

    def published(self, version: WeightVersion, train_step: int) -> None:
        """Engines may put it into place from now on. Its tokens don't count before it is committed; those of an
        abandoned version do now, since the weights before the batch are the ones that made them."""
        self.exported_at.setdefault(version.label, None)
        self._again(train_step, version.root)

    def awaits(self, train_step: int) -> bool:
        """Whether tokens of an abandoned version of this step don't count so far."""
        return any(step == train_step for step, _ in self.abandoned)

    def remade(self, train_step: int, root: str) -> None:
        """As `published`, of weights of which no version could be published."""
        self._again(train_step, root)

    def committed(self, version: WeightVersion, train_step: int) -> None:
        self.exported_at[version.label] = train_step
        self._again(train_step, version.root)

    def _again(self, train_step: int, root: str) -> None:
        self.exported_at |= dict.fromkeys(self.abandoned.pop((train_step, root), ()), train_step)

    def judge(self, groups: Iterable[RolloutGroup], steps_done: int) -> list[Verdict]:
        """What becomes of each group in the batch of step `steps_done`. Raises InvariantBroken that names the group
        for a version that was never published here, or a lag that the schedule rules out."""
        verdicts = [judge(group, self.exported_at, steps_done, self.policy) for group in groups]
        for verdict in verdicts:
            self._within_lead(verdict.group.group_id, verdict.lag)
        return verdicts

    def _within_lead(self, group_id: str, lag: int) -> None:
        if self.lead is not None and self.lead < lag < NEVER:
            raise InvariantBroken(f"group {group_id} has lag {lag}, the schedule allows {self.lead}")

    def check(self, trained: Mapping[str, Tokens], steps_done: int) -> dict[str, int]:
        """Greatest lag of the tokens that will carry loss, by group id as they are given. Raises InvariantBroken
        for one too old."""
        lags: dict[str, int] = {}
        for group_id, tokens in trained.items():
            lags[group_id] = lag = greatest_lag(group_id, tokens, self.exported_at, steps_done)
            self._within_lead(group_id, lag)
            if lag > self.policy.max_staleness:
                raise InvariantBroken(f"group {group_id} was to train: {STALE}{too_old(lag, self.policy)}")
        return lags

    def count(self, groups: Iterable[Tokens], steps_done: int) -> Counter[int]:
        """Tokens that will carry loss, by lag."""
        return trained_lags(groups, self.exported_at, steps_done)

    def lags(self, steps_done: int) -> Callable[[Trajectory], tuple[int, ...]]:
        """Gives the lag of each token of a trajectory that trains as step `steps_done`."""
        return lambda member: token_lags(member, self.exported_at, steps_done)
