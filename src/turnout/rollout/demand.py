"""What the step under way still needs: groups, and patience with those that fail or are filtered. Pure.

Owns the number of the step, what is in hand for it and what was lost on the way to it. Promises: a prompt is wanted
only where a step that is left has a use for its group, and so many more as --over-sampling-batch-size asks for;
failures have a limit that names the commonest reason.
"""

from __future__ import annotations

from collections import Counter

from turnout.core.errors import TrainError
from turnout.core.types import RolloutGroup
from turnout.rollout.filters import FilterRound
from turnout.rollout.pool_plan import PoolPlan


class Demand:
    """`in_hand`: groups that were taken for the step; `failed`: those that failed in it, by reason; `filters`: what
    its filter did."""

    def __init__(self, plan: PoolPlan, step: int) -> None:
        self._plan, self.step, self.in_hand = plan, step, 0
        self.failed: Counter[str] = Counter()
        self.filters = FilterRound(plan.limits.filters)

    def wanted(self, complete: int, others: int) -> int:
        """How many more groups can be used beside those that are complete and `others` that may become so."""
        plan = self._plan
        if self.filters.full:
            return 0
        left = plan.slots
        if plan.steps is not None:
            left = (plan.steps - self.step) * plan.per_step - self.in_hand
        if plan.surplus and not plan.beside:
            left = min(left, plan.per_step - self.in_hand)
        missing = left - complete
        return missing + plan.surplus - others if missing > 0 else 0

    def next_step(self) -> tuple[RolloutGroup, ...]:
        """The groups in hand are the batch; groups that were kept aside for it, which are to be dropped."""
        self.step += 1
        self.in_hand = 0
        self.failed.clear()
        return self.filters.begin()

    def check(self) -> None:
        """Raises TrainError where too many groups failed."""
        most = self._plan.limits.max_failed
        if self.failed.total() > most:
            reason, times = self.failed.most_common(1)[0]
            raise TrainError(
                f"rollout {self.step}: {self.failed.total()} groups failed (--max-failed-groups {most}), "
                f"{times} of them with: {reason}"
            )
