"""A run that only samples (--debug-rollout-only): what differs from one that trains.

Promises: the version that the engines began with stays current, and counts as that of every step, so that slots
come back as they would; a group ends as dropped, with the reason, when its step is over.
"""

from __future__ import annotations

from turnout.core.version import WeightVersion
from turnout.schedule.loop import StepBatch
from turnout.schedule.parts import BatchMaker
from turnout.schedule.updates import Updates

SAMPLED = "sampled only (--debug-rollout-only)"


class SampledBatches(BatchMaker):
    """Batches that nobody trains."""

    def trained(self, batch: StepBatch, lags: dict[str, int]) -> None:  # noqa: ARG002
        with self._book.transaction():
            for group in batch.groups:
                self._book.drop(group.group_id, SAMPLED)


class StandingVersion(Updates):
    """Versions of a run without a trainer: one."""

    async def publish(self, steps_done: int, last: bool) -> WeightVersion:  # noqa: ARG002
        self._around.gate.committed(self.current, steps_done)
        self._around.in_flight.committed(steps_done, self.current.root)
        return self.current
