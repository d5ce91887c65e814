"""`turnout eval`: the held-out prompts of a run on a checkpoint or on a running engine, without training."""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from pathlib import Path

from turnout.config.run_config import RunConfig
from turnout.core.errors import EngineError
from turnout.core.ports import Clock
from turnout.core.rng import SeedTree
from turnout.rollout.evaluate import EvalPoint, EvalSet, evaluate
from turnout.rollout.rewards import RewardRunner, load_reward
from turnout.rollout.sampler import Routes, Sampler
from turnout.rollout.tokenizer import load_tokenizer
from turnout.rollout.worker import Generator
from turnout.schedule import wiring
from turnout.schedule.evaluations import EVAL_SEEDS
from turnout.schedule.inputs import eval_plan
from turnout.schedule.session import ATTEST_DEADLINE_S
from turnout.serving.address import parse_address
from turnout.serving.client import EngineClient
from turnout.serving.launcher import launch


async def score(
    config: RunConfig, model: Path, engine_url: str | None, folder: Path, clock: Clock
) -> list[EvalPoint]:
    """One point per evaluation set of the configuration, sampled with the seeds that a run uses. With
    `engine_url` that engine answers, and nothing is started; `folder` takes the log of an own one."""
    tokenizer = load_tokenizer(model)
    plan = eval_plan(config, tokenizer)
    async with AsyncExitStack() as stack:
        if engine_url is not None:
            client = EngineClient("given", parse_address(engine_url, "--engine-url"), clock)
            stack.push_async_callback(client.close)
            await client.health(ATTEST_DEADLINE_S)
        else:
            engine = await launch(wiring.engine_launch(config, 0, model, (folder, folder)), clock)
            stack.push_async_callback(engine.stop)
            client = engine.client
        with suppress(EngineError):  # a foreign engine has no attestation to give; its replies name a version
            client.version = (await client.attest(ATTEST_DEADLINE_S)).label
        rewards = RewardRunner(load_reward(config.reward), clock, config.reward_timeout_s)
        generator = Generator(Sampler(Routes(lambda: [client]), tokenizer, clock), rewards)
        sets: list[EvalSet] = [*plan.sets, *plan.before_only]
        return [await evaluate(generator, rewards, data, SeedTree(*EVAL_SEEDS)) for data in sets]
