"""Long generations over what happens to real engines: one is killed, weights change under them, groups are cut.

Float32 and kernels whose rows depend on nothing else: what is made in pieces equals what is made in one.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine_models import make_model
from tests.engine_process import EngineProcess, two_engines
from tests.process.test_update_faults import address_of
from tests.unit.rollout.parts import Log, Numbers
from turnout.core.errors import WeightError
from turnout.core.rng import SeedTree
from turnout.core.types import Prompt, RolloutGroup, Trajectory
from turnout.core.version import WeightVersion
from turnout.placement.real import DiskStore, RealClock
from turnout.protocol.sglang import GenerateRequest, SamplingParams
from turnout.rollout.cut import Cut
from turnout.rollout.draft import Draft
from turnout.rollout.rewards import RewardRunner
from turnout.rollout.sampler import Routes, Sampler, SamplingPlan
from turnout.rollout.worker import Generator
from turnout.serving.client import EngineClient
from turnout.serving.weights_client import OnUpdate
from turnout.transfer.disk import DiskTransport
from turnout.transfer.updater import UpdatePolicy, Updater
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.digest import root_of
from turnout.weights.store import WeightStore

NEW, MEMBERS, INTERVAL = 240, 4, 32
FLAGS = ("--dtype", "float32", "--max-total-tokens", "8192", "--incremental-streaming-output")
SEEDS = SeedTree(5)
PLAN = SamplingPlan(
    MEMBERS, SamplingParams(max_new_tokens=NEW, temperature=0.8, ignore_eos=True), 100.0, MEMBERS
)
GROUPS = [RolloutGroup(f"g{n}", n, 0, Prompt(f"p{n}", tuple(range(10 + n, 50 + n)), "", n)) for n in range(2)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [make_model(root / f"m{seed}", "qwen3", torch.float32, seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def engines(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The second of the two is killed by its test."""
    yield from two_engines(models[0], tmp_path_factory, *FLAGS)


class Keep:
    """A journal of one group, by member."""

    def __init__(self) -> None:
        self.pieces: dict[int, list[Trajectory]] = defaultdict(list)
        self.news = asyncio.Event()

    def tokens(self, member: int, draft: Draft) -> None:
        self.pieces[member].append(draft.after(self.count(member)))
        self.news.set()

    def ended(self, member: int, made: Trajectory) -> None: ...

    def count(self, member: int) -> int:
        return sum(len(piece.response_ids) for piece in self.pieces[member])

    async def until(self, tokens: int) -> None:
        """Every member has so many."""
        while any(self.count(member) < tokens for member in range(MEMBERS)):
            self.news.clear()
            await self.news.wait()


class Work:
    """A generator on clients of these engines; `dead` are fenced."""

    def __init__(self, engines: list[EngineProcess], routes: Callable[..., Routes] | None = None) -> None:
        clock = RealClock()
        self.clients = [EngineClient(f"e{at}", address_of(p.url), clock) for at, p in enumerate(engines)]
        self.dead: set[str] = set()
        made = Routes(self.routable) if routes is None else routes()
        self.sampler = Sampler(made, Numbers(), clock)

        async def reward(prompt: str, response: str, label: Any) -> float:
            return 1.0

        self.generator = Generator(self.sampler, RewardRunner(reward, clock))

    def routable(self) -> list[EngineClient]:
        return [client for client in self.clients if client.engine_id not in self.dead]

    async def group(
        self, group: RolloutGroup, keep: Keep | None = None, cut: Cut | None = None
    ) -> RolloutGroup:
        return await self.generator.group(group, PLAN, SEEDS, keep, cut)


def on(engines: list[EngineProcess], use: Callable[[Work], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        work = Work(engines)
        try:
            return await asyncio.wait_for(use(work), 120)
        finally:
            for client in work.clients:
                await client.close()

    return asyncio.run(main())


def tokens_made(process: EngineProcess) -> int:
    text = process.call("/metrics")[1]
    return int(float(re.search(r"^sglang:generation_tokens_total(?:{.*?})? (\S+)", text, re.MULTILINE)[1]))  # type: ignore[index]


def same(made: RolloutGroup, want: RolloutGroup) -> None:
    assert made.rewards == [1.0] * MEMBERS
    for one, other in zip(made.trajectories, want.trajectories, strict=True):
        assert (one.response_ids, one.logprobs) == (other.response_ids, other.logprobs)
        assert one.finish is other.finish and one.loss_mask == (1,) * NEW


@pytest.fixture(scope="module")
def undisturbed(engines: list[EngineProcess]) -> list[RolloutGroup]:
    async def use(work: Work) -> list[RolloutGroup]:
        return [await work.group(group) for group in GROUPS]

    return on(engines[:1], use)


def test_a_group_that_is_cut_and_taken_up_again_is_the_uncut_one(engines, undisturbed):
    async def use(work: Work) -> None:
        keep, cut = Keep(), Cut()
        task = asyncio.ensure_future(work.group(GROUPS[0], keep, cut))
        await keep.until(INTERVAL)
        cut()
        partial = await task
        assert partial.partial and all(t.partial for t in partial.trajectories)
        for member, made in enumerate(partial.trajectories):
            assert INTERVAL <= len(made.response_ids) == keep.count(member) < NEW
        resumed = await work.group(partial, keep)
        same(resumed, undisturbed[0])
        assert work.sampler.resumes == MEMBERS and work.sampler.tokens_made == MEMBERS * NEW
        for member, made in enumerate(resumed.trajectories):
            journalled = [token for piece in keep.pieces[member] for token in piece.response_ids]
            assert journalled == list(made.response_ids), "each token once, in order"

    on(engines[:1], use)


class Deployment:
    """One engine, and versions of its weights that reach it by a shared directory."""

    def __init__(self, process: EngineProcess, models: list[Path], folder: Path, policy: OnUpdate) -> None:
        clock = RealClock()
        self.models, self.log = models, Log()
        flags = {"model_path": str(models[0]), "weight_version": "default"}
        assert process.call("/update_weights_from_disk", flags)[0] == 200
        base = WeightVersion(0, 0, root_of(read_checkpoint(models[0])))
        store = WeightStore(folder / "w", DiskStore(), models[0], 1 << 20)
        store.open("run", 0, base.root)
        self.base, transport = base, DiskTransport(store, clock)
        transport.on_update = policy
        client = EngineClient("e0", address_of(process.url), clock)
        drained = UpdatePolicy(drained=policy is OnUpdate.DRAIN)
        self.updater = Updater(transport, [client], self.log, clock, drained)

    async def update(self) -> WeightVersion:
        update = self.updater.begin(lambda: read_checkpoint(self.models[1]), 1, 30.0)
        await update.publish()
        await update.prepare()
        return await update.commit()


@pytest.mark.parametrize("policy", OnUpdate)
def test_an_update_in_the_middle(engines, models, tmp_path, policy, monkeypatch):
    monkeypatch.setattr("turnout.transfer.update.IDLE_S", 0.0)  # else they may end while it waits

    async def main() -> None:
        run = Deployment(engines[0], models, tmp_path, policy)
        fleet, client = run.updater.fleet, run.updater.fleet.engines["e0"]
        work = Work(engines[:1], lambda: Routes(fleet.routable, fleet.standing, fleet.changed))
        try:
            await run.updater.adopt(run.base, 20.0)
            keep = Keep()
            task = asyncio.ensure_future(work.group(GROUPS[0], keep))
            await keep.until(INTERVAL)
            if policy is OnUpdate.DRAIN:
                with pytest.raises(WeightError, match="requests are in flight on e0"):
                    await run.update()
                assert client.version == run.base.label
                made = await asyncio.wait_for(task, 60)
                assert all(t.spans.labels == (run.base.label,) for t in made.trajectories)
                await run.update()
                return
            version = await run.update()
            made = await asyncio.wait_for(task, 60)
            assert work.sampler.resumes == (MEMBERS if policy is OnUpdate.ABORT else 0)
            for member, one in enumerate(made.trajectories):
                assert one.spans.labels == (run.base.label, version.label)
                seam = one.spans.runs[0][0]
                assert INTERVAL <= seam < NEW == len(one.response_ids)
                mixed = 1 if policy is OnUpdate.CONTINUE else 0
                assert one.kv_mixed == (0,) * seam + (mixed,) * (NEW - seam)
                assert sum(len(p.response_ids) for p in keep.pieces[member]) == NEW
                await _check_rest(client, one, seam, policy)
        finally:
            await client.close()
            for each in work.clients:
                await each.close()

    async def _check_rest(client: EngineClient, one: Trajectory, seam: int, policy: OnUpdate) -> None:
        """What follows the seam is what the new weights make of the tokens before it, where their KV is its own;
        KV of two versions was cached for nobody."""
        ids = (*GROUPS[0].prompt.token_ids, *one.response_ids[:seam])
        params = SamplingParams(NEW - seam, temperature=0.8, ignore_eos=True, sampling_seed=one.seed)
        reply = await client.generate(GenerateRequest(f"check-{one.seed}", ids, params), 60.0)
        alike = reply.output_ids == one.response_ids[seam:]
        if policy is OnUpdate.CONTINUE:
            assert not alike and reply.cached_tokens < 64, "only the prompt, of the checks before this one"
        else:
            assert alike and reply.logprobs == one.logprobs[seam:]

    asyncio.run(main())
    flags = {"model_path": str(models[0]), "weight_version": "default"}
    assert engines[0].call("/update_weights_from_disk", flags)[0] == 200


def test_sigkill_of_an_engine_in_the_middle_of_eight_generations(engines, undisturbed):
    """Each of its trajectories keeps all but the last 32 tokens and goes on on the other engine."""

    async def use(work: Work) -> None:
        keeps = [Keep(), Keep()]
        tasks = [asyncio.ensure_future(work.group(*pair)) for pair in zip(GROUPS, keeps)]
        before = tokens_made(engines[1])
        await keeps[1].until(2 * INTERVAL)
        assert not any(task.done() for task in tasks)
        known = await asyncio.to_thread(tokens_made, engines[1]) - before
        engines[1].process.kill()
        await asyncio.to_thread(engines[1].process.wait, 30)
        work.dead.add("e1")
        kept = [keeps[1].count(member) for member in range(MEMBERS)]
        made = [await task for task in tasks]
        for group, want in zip(made, undisturbed, strict=True):
            same(group, want)
        assert [t.engines.labels for t in made[0].trajectories] == [("e0",)] * MEMBERS
        received = []
        for member, one in enumerate(made[1].trajectories):
            assert one.engines.labels == ("e1", "e0"), "its runs name both engines"
            received.append(one.engines.runs[0][0])
            assert 2 * INTERVAL <= kept[member] <= received[-1] < NEW
            pieces = [token for piece in keeps[1].pieces[member] for token in piece.response_ids]
            assert pieces == list(one.response_ids), "no journalled token was made twice"
        assert sum(received) >= known - MEMBERS * INTERVAL
        assert work.sampler.resumes == MEMBERS

    on(engines, use)
