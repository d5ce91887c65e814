"""What rollout tests share: prompts, a plan, a clock without waiting, a generator on scripted engines."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tests.scripted_engine import ScriptedEngine
from turnout.core.rng import SeedTree
from turnout.core.types import Prompt
from turnout.placement.real import RealClock
from turnout.protocol.sglang import SamplingParams
from turnout.rollout.book import GroupBook
from turnout.rollout.draft import Pace
from turnout.rollout.ledger import Ledger
from turnout.rollout.ledger_owner import Claim
from turnout.rollout.ledger_schema import Database, open_database
from turnout.rollout.pool import RolloutPool
from turnout.rollout.pool_plan import CollectLimits, PoolPlan, Ports, Taken
from turnout.rollout.rewards import RewardRunner
from turnout.rollout.sampler import Routes, Sampler
from turnout.rollout.source import PromptSource
from turnout.rollout.worker import Generator, SamplingPlan

T = TypeVar("T")
TOKENS = 3
SEEDS = SeedTree(11)
NO_LIMITS = CollectLimits(max_failed=100)


class QuickClock(RealClock):
    """Sleeps take no time but move `now`; calls get more time than any test has."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def now(self) -> float:
        return sum(self.slept)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    async def within(self, seconds: float, what: str, work: Awaitable[T]) -> T:
        return await super().within(max(seconds, 300.0), what, work)


class Numbers:
    """Decodes ids to their decimal spelling."""

    eos_ids: tuple[int, ...] = ()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, token_ids))


def memory_ledger(database: Database | None = None) -> Ledger:
    """A ledger in memory; of an earlier one's database, its next incarnation."""
    claim = Claim(RealClock(), "here", 1, lives=lambda pid: False)
    return Ledger(database or open_database(None), claim)


class Log:
    """An event sink that keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def emit(self, event: Any) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def prompts(count: int) -> list[Prompt]:
    """Prompt n has the ids (n,) and the label n."""
    return [Prompt(f"p{n}", (n,), f"text {n}", n) for n in range(count)]


def plan(samples: int = 2, deadline_s: float = 20.0, min_group: int | None = None) -> SamplingPlan:
    return SamplingPlan(samples, SamplingParams(max_new_tokens=TOKENS), deadline_s, min_group or samples)


class Bench:
    """A source, a book and a generator on running engines. `reward` scores (prompt number,
    response text)."""

    def __init__(
        self, *engines: ScriptedEngine, rows: int = 100, reward: Any = None, clock: Any = None
    ) -> None:
        self.clock = clock or QuickClock()
        self.log, self.source = Log(), PromptSource(prompts(rows), SeedTree(0), False, 1)
        self.book = GroupBook(self.log, memory_ledger())
        self.scored: list[tuple[int, str]] = []

        async def score(prompt: str, response: str, label: Any) -> Any:
            self.scored.append((label, response))
            return 1.0 if reward is None else reward(label, response)

        self.rewards = RewardRunner(score, RealClock())
        clients = [engine.client(self.clock) for engine in engines]
        routes = Routes(lambda: clients, changed=lambda: self.clock.sleep(0.2))
        self.generator = Generator(Sampler(routes, Numbers(), self.clock), self.rewards)
        self.ports = Ports(self.source, self.book, self.generator, SEEDS, self.clock)

    def every_token(self) -> None:
        """Each token is journalled as it comes."""
        sampler = self.generator.sampler
        sampler._desk = replace(sampler._desk, pace=Pace(tokens=1))

    async def collect(
        self, step: int, count: int, sampling: SamplingPlan, limits: CollectLimits = NO_LIMITS
    ) -> Taken:
        """The groups of one step from a pool of its own."""
        pool = RolloutPool(self.ports, PoolPlan(count, count, 1, None, sampling, limits, 20.0), step)
        try:
            return await pool.take(count)
        finally:
            await pool.close()
