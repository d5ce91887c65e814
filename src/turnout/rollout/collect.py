"""One rollout: exactly `count` completed groups, or the reason why not.

Promises: a group that fails is dropped with its reason and replaced by one new prompt, never by a wave;
groups come back in source order; both kinds of replacement have a limit. More than `max_failed` failures are
an error that names the commonest reason; after `max_filtered` groups without variance no more prompts are
taken and the batch is what passed, unless nothing did, which is an error. Fewer groups also come back at the
end of the data; `short` says why.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from turnout.core.errors import TrainError
from turnout.core.rng import SeedTree
from turnout.core.types import RolloutGroup
from turnout.rollout.book import GroupBook
from turnout.rollout.source import PromptSource
from turnout.rollout.worker import Generator, GroupFailed, SamplingPlan


@dataclass(frozen=True)
class CollectLimits:
    """`filter_equal` drops groups whose rewards are all equal (dynamic sampling)."""

    max_failed: int
    max_filtered: int
    filter_equal: bool


@dataclass(frozen=True)
class Collected:
    """The groups in source order, what was dropped on the way, and why there are fewer than asked
    (`short`, empty when the batch is full)."""

    groups: list[RolloutGroup]
    failed: int
    filtered: int
    short: str


class Collector:
    """Fills batches from the source. One `collect` runs at a time."""

    def __init__(self, source: PromptSource, book: GroupBook, generator: Generator, seeds: SeedTree) -> None:
        self._source, self._book, self._generator, self._seeds = source, book, generator, seeds

    async def collect(self, step: int, count: int, plan: SamplingPlan, limits: CollectLimits) -> Collected:
        """Consumes prompts, waits for generation and rewards, produces groups in source order."""
        running: dict[asyncio.Task[RolloutGroup], RolloutGroup] = {}
        done: list[RolloutGroup] = []
        failed: Counter[str] = Counter()
        filtered, short = 0, ""
        try:
            while len(done) < count:
                missing = count - len(done) - len(running)
                if missing and not short:
                    fresh = self._start(missing, step, plan)
                    short = "end of the data" if len(fresh) < missing else ""
                    running |= fresh
                if not running:
                    break
                ready, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(ready, key=lambda t: running[t].ordinal):
                    outcome = self._outcome(task, running.pop(task), limits)
                    if isinstance(outcome, RolloutGroup):
                        done.append(outcome)
                    elif outcome is None:
                        filtered += 1
                    else:
                        failed[outcome] += 1
                _check_failures(step, failed, limits)
                if filtered >= limits.max_filtered:
                    short = f"{filtered} groups had equal rewards"
        finally:
            await _cancel(running)
        if not done and filtered:
            raise TrainError(
                f"rollout {step}: all {filtered} groups had equal rewards (--dynamic-sampling-max-waves): the "
                "task is too easy or too hard for this model, or the reward does not tell answers apart"
            )
        return Collected(sorted(done, key=lambda g: g.ordinal), failed.total(), filtered, short)

    def _start(
        self, missing: int, step: int, plan: SamplingPlan
    ) -> dict[asyncio.Task[RolloutGroup], RolloutGroup]:
        started: dict[asyncio.Task[RolloutGroup], RolloutGroup] = {}
        for ordinal, prompt in self._source.take(missing):
            group = RolloutGroup(f"g{ordinal:08d}.0", ordinal, 0, prompt)
            self._book.admit(group, step)
            self._book.start(group.group_id)
            started[asyncio.ensure_future(self._generator.group(group, plan, self._seeds))] = group
        return started

    def _outcome(
        self, task: asyncio.Task[RolloutGroup], waiting: RolloutGroup, limits: CollectLimits
    ) -> RolloutGroup | str | None:
        """The completed group, the reason of its failure, or None where it was filtered."""
        try:
            group = task.result()
        except GroupFailed as fault:
            self._book.drop(waiting.group_id, str(fault))
            return str(fault)
        self._book.complete(group)
        if limits.filter_equal and max(group.rewards) == min(group.rewards):
            self._book.drop(group.group_id, "all rewards equal")
            return None
        return group


def _check_failures(step: int, failed: Counter[str], limits: CollectLimits) -> None:
    if failed.total() > limits.max_failed:
        reason, times = failed.most_common(1)[0]
        raise TrainError(
            f"rollout {step}: {failed.total()} groups failed (--max-failed-groups {limits.max_failed}), "
            f"{times} of them with: {reason}"
        )


async def _cancel(running: dict[asyncio.Task[RolloutGroup], RolloutGroup]) -> None:
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
