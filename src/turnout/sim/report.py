"""What a world is asked for, and what it tells.

Imports nothing of the control plane: the process that only hands seeds to others has no use for it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from turnout.sim.faults import KINDS

SCHEDULE_NAMES = ("sync", "pipelined", "async")
LOST, DOUBLED, OVER_BOUND, STUCK, INVARIANT = "lost", "doubled", "over_bound", "stuck", "invariant_failures"
COUNTS = (LOST, DOUBLED, OVER_BOUND, STUCK, INVARIANT)


@dataclass(frozen=True)
class WorldOptions:
    """`kinds` of faults (turnout.sim.faults); `schedule` None: drawn; `trace`: keep who did what; `folder`: where
    the disks of worlds are made (None: in memory, where there is such a place)."""

    kinds: tuple[str, ...] = tuple(KINDS)
    schedule: str | None = None
    trace: bool = False
    folder: Path | None = None


@dataclass
class SeedReport:
    """What became of one world. `lags` are those of the groups of each step, by the events."""

    seed: int
    schedule: str
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list[str])
    faults: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    virtual_seconds: float = 0.0
    final_root: str | None = None
    lags: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    trace: list[str] = field(default_factory=list[str])

    def line(self) -> str:
        found = ", ".join(f"{name} {n}" for name, n in self.counts.items() if n)
        return (
            f"seed {self.seed}: {self.schedule}, {self.happened['controllers']} controllers, "
            f"{self.virtual_seconds:.0f} virtual seconds: {found or 'every promise kept'}"
        )
