"""The schedules are values, not programs.

`lead` is how many train steps rollouts may run ahead of training, `drain` whether requests in flight are waited for
before a version is activated, `swap` whether trainer and engines take turns on the same memory, `interval` how many
train steps lie between two versions.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnout.config.run_config import RunConfig


@dataclass(frozen=True)
class Schedule:
    name: str
    lead: int
    drain: bool
    swap: bool = False
    interval: int = 1


SYNC = Schedule("sync", lead=0, drain=True)


def schedule_of(config: RunConfig) -> Schedule:
    interval, swap = config.update_weights_interval, config.offloads_train or config.offloads_rollout
    return Schedule(config.schedule, config.lead, config.drains, swap, interval)
