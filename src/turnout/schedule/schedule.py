"""The schedules are values, not programs.

`lead` is how many train steps rollouts may run ahead of training, `drain` whether requests in flight are
waited for before a version is activated, `swap` whether trainer and engines take turns on the same memory.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    name: str
    lead: int
    drain: bool
    swap: bool

    @property
    def max_lag(self) -> int:
        """Largest lag a trained token can have: train steps done when it trains, less those done when its
        version was exported."""
        return self.lead


SYNC = Schedule("sync", lead=0, drain=True, swap=False)
SCHEDULES = {schedule.name: schedule for schedule in (SYNC,)}
