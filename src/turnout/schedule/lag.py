"""The lag gate: how old a batch is, and whether it may train.

Lag of a token: train steps done when it is trained, less train steps done when its version was exported. The
lag of a group is its largest. A version that was never committed here has no lag: its tokens never train.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from turnout.core.errors import InvariantBroken
from turnout.core.types import RolloutGroup
from turnout.core.version import WeightVersion
from turnout.rollout.book import versions_of


@dataclass
class LagGate:
    """Knows at which train step each committed version was exported."""

    max_lag: int
    exported_at: dict[str, int] = field(default_factory=dict)

    def committed(self, version: WeightVersion, train_step: int) -> None:
        self.exported_at[version.label] = train_step

    def check(self, groups: Iterable[RolloutGroup], steps_done: int) -> dict[str, int]:
        """Lag by group id; raises InvariantBroken that names the group for an unknown version or a lag above
        the bound."""
        lags: dict[str, int] = {}
        for group in groups:
            versions = versions_of(group)
            unknown = [label for label in versions if label not in self.exported_at]
            if unknown:
                raise InvariantBroken(
                    f"group {group.group_id} holds tokens of {unknown}, never committed here"
                )
            lag = max((steps_done - self.exported_at[label] for label in versions), default=0)
            if lag > self.max_lag:
                raise InvariantBroken(
                    f"group {group.group_id} has lag {lag}, the schedule allows {self.max_lag}"
                )
            lags[group.group_id] = lag
        return lags
