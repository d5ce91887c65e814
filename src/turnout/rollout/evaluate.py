"""One evaluation point: held-out prompts, sampled on one named version, scored, failures counted apart.

Promises: a point whose tokens come from two versions is refused; a failed request or an
unscored answer is counted, never zeroed; the score is the mean reward of the finished samples. The seeds
depend on the data set's place and the sample, not on the step: points of a run differ by the weights only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from turnout.core.errors import EngineDead, EngineError, InvariantBroken
from turnout.core.rng import SeedTree
from turnout.core.types import Finish, Prompt, Trajectory
from turnout.placement.tasks import together
from turnout.rollout.book import samples_digest
from turnout.rollout.rewards import RewardRunner
from turnout.rollout.worker import Generator, SamplingPlan

CONCURRENCY = 128


@dataclass(frozen=True)
class EvalSet:
    """What to evaluate and how to sample it."""

    name: str
    prompts: Sequence[Prompt]
    plan: SamplingPlan


@dataclass(frozen=True)
class EvalSample:
    """One finished sample. `reward` is None where the reward gave no number."""

    prompt: Prompt
    text: str
    reward: float | None
    tokens: int


@dataclass(frozen=True)
class EvalPoint:
    """Samples in data order, prompt by prompt. `failed` counts samples without a reward; `digest` is over token ids
    and exact log-probs of those that were finished, so that points can be compared bit for bit."""

    name: str
    version: str
    score: float
    items: int
    failed: int
    samples: list[EvalSample]
    digest: str = ""


async def evaluate(generator: Generator, rewards: RewardRunner, data: EvalSet, seeds: SeedTree) -> EvalPoint:
    """Raises InvariantBroken when the samples come from two versions, EngineDead when an engine is gone."""
    gate = asyncio.Semaphore(CONCURRENCY)
    jobs = [(prompt, member) for prompt in data.prompts for member in range(data.plan.samples)]

    async def one(index: int, prompt: Prompt, member: int) -> tuple[EvalSample, Trajectory | None]:
        async with gate:
            made = await _sampled(
                generator, prompt, data.plan, seeds.child(prompt.prompt_id, member).seed, index
            )
        if made is None or made.finish is Finish.ABORT:
            return EvalSample(prompt, "" if made is None else made.text, None, 0), None
        scored = await rewards.score(prompt.text, made.text, prompt.label, prompt.metadata)
        return EvalSample(prompt, made.text, scored.value, len(made.response_ids)), made

    results = await together(one(i, prompt, member) for i, (prompt, member) in enumerate(jobs))
    finished = [made for _, made in results if made is not None]
    versions = sorted({label for made in finished for label in made.spans.labels})
    if len(versions) > 1:
        raise InvariantBroken(f"evaluation {data.name} has tokens of several versions: {versions}")
    values = [sample.reward for sample, _ in results if sample.reward is not None]
    return EvalPoint(
        name=data.name,
        version=versions[0] if versions else "none",
        score=sum(values) / len(values) if values else 0.0,
        items=len(values),
        failed=len(results) - len(values),
        samples=[sample for sample, _ in results],
        digest=samples_digest(finished),
    )


async def _sampled(
    generator: Generator, prompt: Prompt, plan: SamplingPlan, seed: int, turn: int
) -> Trajectory | None:
    try:
        return await generator.sample(prompt, plan, seed, turn)
    except EngineDead:
        raise
    except EngineError:
        return None
