"""What a pool of rollouts is told, what it works with, and what it hands out (turnout.rollout.pool)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from turnout.core.errors import TurnoutError
from turnout.core.ports import Clock
from turnout.core.rng import SeedTree
from turnout.core.types import RolloutGroup
from turnout.rollout.admission import Admission
from turnout.rollout.book import GroupBook
from turnout.rollout.filters import FilterPlan
from turnout.rollout.sampler import SamplingPlan
from turnout.rollout.source import PromptSource
from turnout.rollout.worker import Generator

NO_DATA = "end of the data"
SURPLUS = "surplus"


@dataclass(frozen=True)
class CollectLimits:
    """Of one step: groups that may fail, and what the filter may reject."""

    max_failed: int
    filters: FilterPlan = field(default_factory=FilterPlan)


@dataclass(frozen=True)
class PoolPlan:
    """`per_step` groups a step, `steps` steps in all (None: until the data ends), `deadline_s` for each `take`.
    `surplus` groups are sampled beyond those that train (over-sampling). Where rollouts go on beside training
    (`beside`) the rest is cut before new weights are put into place, once the next batch is complete; else when a
    step has its groups. It is kept (`partial`) or dropped. `last_batch`: whether groups at the end of the data
    that don't fill a batch are to be trained or dropped. `deterministic`: what a version owes is made by it, also
    where the run is told to stop meanwhile, so that a run that goes on equals one that nobody stopped."""

    per_step: int
    slots: int
    window: int
    steps: int | None
    sampling: SamplingPlan
    limits: CollectLimits
    deadline_s: float
    surplus: int = 0
    beside: bool = False
    partial: bool = False
    last_batch: str = "train"
    deterministic: bool = False

    @property
    def drops_cut(self) -> bool:
        """Whether a group that is cut ends by that."""
        return self.surplus > 0 and not self.partial


@dataclass(frozen=True)
class Taken:
    """Groups in order, what was lost on the way, and why there are fewer than asked (`short`)."""

    groups: list[RolloutGroup]
    failed: int
    filtered: int
    short: str
    last: bool


@dataclass(frozen=True)
class Ports:
    """What the pool works with. `failure` is why no version is committed any more, if that is so; `updating` says
    whether one is on its way."""

    source: PromptSource
    book: GroupBook
    generator: Generator
    seeds: SeedTree
    clock: Clock
    failure: Callable[[], TurnoutError | None] = lambda: None
    updating: Callable[[], bool] = lambda: False
    admission: Admission | None = None
