"""Held-out prompts of a run on a checkpoint, on a kept version, or on a running engine, without training.

Promises: a version's points carry its label, and the engine that answered them attested its root digest (a stock
engine has none to give); each engine that is started here is stopped again.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from turnout.config.run_config import RunConfig
from turnout.core.errors import EngineError, TurnoutError, WeightError
from turnout.core.ports import Clock, Store
from turnout.core.rng import SeedTree
from turnout.core.version import WeightVersion
from turnout.rollout.evaluate import EvalMeans, EvalPoint, EvalSet, NoPoint, evaluate
from turnout.rollout.sampler import Routes, Sampler
from turnout.rollout.tokenizer import load_tokenizer
from turnout.rollout.worker import Generator
from turnout.schedule import wiring
from turnout.schedule.eval_sets import load_eval_plan
from turnout.schedule.evaluations import EVAL_SEEDS, EvalRuns
from turnout.serving.address import parse_address
from turnout.serving.client import EngineClient
from turnout.serving.launcher import Engine, launch
from turnout.serving.models import Models
from turnout.serving.roster import EnginePlan, Program
from turnout.serving.sglang_launcher import launch_sglang
from turnout.weights.whole import whole_checkpoint

ATTEST_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Scored:
    """What is scored: a checkpoint on an engine of its own, or the running engine at `engine_url`. `version` is
    what the checkpoint must be (None: points carry whatever label the engine has)."""

    checkpoint: Path
    engine_url: str | None = None
    version: WeightVersion | None = None


async def score(config: RunConfig, what: Scored, clock: Clock) -> list[EvalPoint | NoPoint]:
    """One point per evaluation set of the configuration, sampled with the seeds that a run uses."""
    plan = load_eval_plan(config, load_tokenizer(what.checkpoint))
    return await score_sets(config, what, [*plan.sets, *plan.before_only], clock)


async def score_sets(
    config: RunConfig, what: Scored, sets: Sequence[EvalSet], clock: Clock, models: Models | None = None
) -> list[EvalPoint | NoPoint]:
    """As `score`, for these sets, with rewards that may ask `models`. Raises EngineError, or WeightError for an
    engine that holds something else."""
    async with _answering(config, what, clock) as client:
        rewards = wiring.reward_runner(config, clock, models)
        tokenizer = load_tokenizer(what.checkpoint)
        sampler = Sampler(Routes(lambda: [client]), tokenizer, clock)
        generator = Generator(wiring.samples(config, sampler, tokenizer), rewards)
        means = EvalMeans(generator, rewards, SeedTree(*EVAL_SEEDS))
        made: list[EvalPoint | NoPoint] = []
        for data in sets:
            means.requests.expect(data.requests)
            made.append(await evaluate(means, data, "" if what.version is None else what.version.label))
        return made


async def score_kept(config: RunConfig, evals: EvalRuns, weights: Path, base: Path, files: Store) -> None:
    """Scores the versions that a run kept (--eval-mode checkpoint) into its points. `weights` is the run's store,
    `base` the checkpoint that it began with. A version that cannot be scored is told, and the others are."""
    for version, step, sets in evals.kept:
        try:
            with tempfile.TemporaryDirectory(prefix="turnout-eval-") as folder:
                checkpoint = base
                if version.counter:
                    into = Path(folder) / "checkpoint"
                    _, checkpoint = whole_checkpoint(weights, files, version.counter, base, into)
                what = Scored(checkpoint, version=version)
                made = await score_sets(config, what, sets, evals.clock, evals.models)
        except TurnoutError as fault:
            made = [NoPoint(data.name, version.label, str(fault)) for data in sets]
        for point in made:
            evals.add(point, step)


@asynccontextmanager
async def _answering(config: RunConfig, what: Scored, clock: Clock) -> AsyncIterator[EngineClient]:
    if what.engine_url is not None:
        client = EngineClient("given", parse_address(what.engine_url, "--engine-url"), clock)
        try:
            await client.health(ATTEST_DEADLINE_S)
            # A foreign engine has no attestation to give; its replies name a version.
            with suppress(EngineError):
                client.version = (await client.attest(ATTEST_DEADLINE_S)).label
            yield client
        finally:
            await client.close()
        return
    with tempfile.TemporaryDirectory(prefix="turnout-eval-engine-") as logs:
        engine = await _started(config, what.checkpoint, Path(logs), clock)
        try:
            await _labelled(engine.client, what.version)
            yield engine.client
        finally:
            await engine.stop()


async def _started(config: RunConfig, checkpoint: Path, logs: Path, clock: Clock) -> Engine:
    plan = EnginePlan("engine-0", program=Program(config.engine), ranks=config.rollout_num_gpus_per_engine)
    if plan.program is Program.SGLANG:
        return await launch_sglang(wiring.sglang_launch(config, plan, checkpoint, logs), clock)
    return await launch(wiring.engine_launch(config, plan, checkpoint, (logs, logs)), clock)


async def _labelled(client: EngineClient, version: WeightVersion | None) -> None:
    """The engine answers with the label of the version that it was started with."""
    held = await client.attest(ATTEST_DEADLINE_S)
    if version is None:
        client.version = held.label
        return
    if held.root and held.root != version.root:
        raise WeightError(f"the engine holds {held.root}, {version.label} has the root {version.root}")
    await client.set_version_label(version.label)
    client.version = version.label
