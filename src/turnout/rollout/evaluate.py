"""One evaluation point: held-out prompts, sampled on one named version, scored, failures counted apart.

Promises: a point's requests may be answered by its version only, and all its tokens are of that version, else
there is no point but the reason why not; a failed request or an unscored answer is counted, never zeroed; the score
is the mean reward of the finished samples. The seeds depend on the prompt and the sample, not on the step: points
of a run differ by the weights only.

pass@k is the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, section 2.1): of n finished samples of a
prompt with c correct ones, 1 - C(n - c, k) / C(n, k), as a mean over the prompts with at least k finished samples.
A sample is correct where its reward is at least 1.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from turnout.core.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineError,
    GenerateFailed,
    VersionUnmet,
    WeightError,
)
from turnout.core.ports import Clock
from turnout.core.rng import SeedTree
from turnout.core.types import Finish, Prompt, Trajectory
from turnout.core.waits import EVALUATE
from turnout.placement.tasks import together
from turnout.rollout.book import samples_digest
from turnout.rollout.rewards import Reward, RewardRunner
from turnout.rollout.sampler import SamplingPlan
from turnout.rollout.worker import Generator

CONCURRENCY = 128
CORRECT = 1.0
T = TypeVar("T")


@dataclass(frozen=True)
class EvalSet:
    """What to evaluate, how to sample it, and with what reward (None: that of the run)."""

    name: str
    prompts: Sequence[Prompt]
    plan: SamplingPlan
    reward: Reward | None = None

    @property
    def requests(self) -> int:
        return len(self.prompts) * self.plan.samples


@dataclass(frozen=True)
class EvalSample:
    """One finished sample. `reward` is None where the reward gave no number."""

    prompt: Prompt
    text: str
    reward: float | None
    tokens: int


@dataclass(frozen=True)
class PassAt:
    """pass@k, and the number of prompts that had k finished samples (0: not known any more)."""

    k: int
    value: float
    prompts: int


@dataclass(frozen=True)
class EvalPoint:
    """Samples in data order, prompt by prompt. `failed` counts samples without a reward; `digest` is over token ids
    and exact log-probs of those that were finished, so that points can be compared bit for bit. `pass_at` is empty
    where a prompt has one sample."""

    name: str
    version: str
    score: float
    items: int
    failed: int
    samples: list[EvalSample]
    digest: str = ""
    pass_at: tuple[PassAt, ...] = ()


@dataclass(frozen=True)
class NoPoint:
    """Why a point isn't written."""

    name: str
    version: str
    reason: str


class Requests:
    """The requests of evaluations that are in flight: at most CONCURRENCY at a time, and all can be cut at once."""

    def __init__(self) -> None:
        self._gate = asyncio.Semaphore(CONCURRENCY)
        self._expected = 0
        self._tasks: dict[asyncio.Future[Any], None] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.cut_why = ""

    def expect(self, count: int) -> None:
        """So many requests will be made; until they have ended `idle` waits."""
        self._expected += count
        self._idle.clear()

    async def made(self, request: Awaitable[T]) -> T | None:
        """The answer to an expected request; None where it was cut."""
        task = asyncio.ensure_future(self._gated(request))
        self._tasks[task] = None
        try:
            await asyncio.wait({task})
            return None if task.cancelled() else task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._tasks.pop(task, None)
            self._expected -= 1
            if self._expected == 0:
                self._idle.set()

    async def idle(self, clock: Clock, hold_s: float) -> None:
        """Waits until all have ended, at most so many seconds; then the rest is cut."""
        try:
            await clock.within(hold_s, "the requests of an evaluation", self._idle.wait())
        except DeadlineExceeded:
            self.cut_why = (
                f"{len(self._tasks)} of its requests were not done within {hold_s:g} s (--eval-hold)"
            )
            for task in self._tasks:
                task.cancel()
            await self._idle.wait()

    async def _gated(self, request: Awaitable[T]) -> T:
        async with self._gate:
            return await request


@dataclass(frozen=True)
class EvalMeans:
    """What points are made with: a generator whose routes are the engines that serve the version asked for."""

    generator: Generator
    rewards: RewardRunner
    seeds: SeedTree
    requests: Requests = field(default_factory=Requests)


async def evaluate(means: EvalMeans, data: EvalSet, version: str) -> EvalPoint | NoPoint:
    """Scores `data` on the version with this label (empty: on whatever one version answers, for engines that have
    no label of ours). `means.requests` expects `data.requests`. Raises EngineDead when an engine is gone."""
    requests, rewards = means.requests, means.rewards.of(data.reward)
    jobs = [(prompt, member) for prompt in data.prompts for member in range(data.plan.samples)]
    plan = replace(data.plan, version=version)

    async def one(index: int, prompt: Prompt, member: int) -> tuple[EvalSample, Trajectory | str | None]:
        seed = means.seeds.child(prompt.prompt_id, member).seed
        made = await requests.made(_sampled(means.generator, prompt, plan, seed, index))
        if not isinstance(made, Trajectory) or made.finish is Finish.ABORT:
            text = made.text if isinstance(made, Trajectory) else ""
            return EvalSample(prompt, text, None, 0), made if isinstance(made, str) else None
        value = made.reward  # of its own function
        if value is None:
            with rewards.waited(means.generator.waits.of(EVALUATE)):
                value = (await rewards.score(prompt, made)).value
        return EvalSample(prompt, made.text, value, len(made.response_ids) - made.opening), made

    results = await together(one(i, prompt, member) for i, (prompt, member) in enumerate(jobs))
    unmet = sorted({why for _, why in results if isinstance(why, str)})
    if requests.cut_why or unmet:
        return NoPoint(data.name, version, requests.cut_why or unmet[0])
    finished = [made for _, made in results if isinstance(made, Trajectory)]
    return _point(data, version, [sample for sample, _ in results], finished)


def _point(
    data: EvalSet, version: str, samples: list[EvalSample], finished: list[Trajectory]
) -> EvalPoint | NoPoint:
    labels = sorted({label for made in finished for label in made.spans.labels})
    if len(labels) > 1 or (version and labels not in ([], [version])):
        return NoPoint(data.name, version, f"its tokens are of {' and '.join(labels)}")
    values = [sample.reward for sample in samples if sample.reward is not None]
    return EvalPoint(
        name=data.name,
        version=labels[0] if labels else version or "none",
        score=sum(values) / len(values) if values else 0.0,
        items=len(values),
        failed=len(samples) - len(values),
        samples=samples,
        digest=samples_digest(finished),
        pass_at=pass_at(samples, data.plan.samples),
    )


def pass_at(samples: Iterable[EvalSample], most: int) -> tuple[PassAt, ...]:
    """pass@k for k = 1, 2, 4, ... and `most`, the samples of each prompt; a k that no prompt has finished samples
    for is left out, and so is all of it with one sample."""
    counts: dict[str, tuple[int, int]] = {}
    for sample in samples:
        if sample.reward is not None:
            n, c = counts.get(sample.prompt.prompt_id, (0, 0))
            counts[sample.prompt.prompt_id] = n + 1, c + (sample.reward >= CORRECT)
    if most < 2:
        return ()
    found: list[PassAt] = []
    for k in sorted({most, *(2**power for power in range(most.bit_length()) if 2**power <= most)}):
        values = [
            (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k) for n, c in counts.values() if n >= k
        ]
        if values:
            found.append(PassAt(k, sum(values) / len(values), len(values)))
    return tuple(found)


async def _sampled(
    generator: Generator, prompt: Prompt, plan: SamplingPlan, seed: int, turn: int
) -> Trajectory | str | None:
    """The sample, why the version could not be asked, or None where the request failed."""
    try:
        return await generator.sample(prompt, plan, seed, turn)
    except EngineDead:
        raise
    except (VersionUnmet, WeightError) as fault:
        return f"its version cannot be asked any more: {fault}"
    except (EngineError, GenerateFailed):
        return None
