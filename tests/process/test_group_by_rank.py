"""Full versions through a group to engines of two ranks: each rank is sent what it holds, and no more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine_models import make_model
from tests.engine_process import EngineProcess
from tests.unit.rollout.parts import Log
from turnout.core.errors import WeightError
from turnout.core.version import WeightVersion
from turnout.placement.real import DiskStore, RealClock
from turnout.serving.address import Address
from turnout.serving.client import EngineClient
from turnout.transfer import group
from turnout.transfer.group import GroupTransport
from turnout.transfer.updater import Updater
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.digest import root_of
from turnout.weights.store import WeightStore
from turnout.weights.tensors import HostTensor

BUCKET = 40_000  # several buckets a version
KINDS = [("llama", "ab", ()), ("qwen3_moe", "a", ("--ep-size", "2"))]  # model, engines, flags


class World:
    """Engines of two ranks on the first of three models, and an updater with a group to all."""

    def __init__(self, root: Path, kind: str, names: str, flags: tuple[str, ...]) -> None:
        self.folders = [make_model(root / f"m{seed}", kind, torch.bfloat16, seed) for seed in range(3)]
        self.models = [list(read_checkpoint(folder)) for folder in self.folders]
        options = ("--tp-size", "2", "--dtype", "bfloat16", "--max-total-tokens", "1024", *flags)
        options = (*options, "--update-timeout-s", "8")
        self.engines = []
        for name in names:
            (root / name).mkdir()
            self.engines.append(EngineProcess(self.folders[0], root / name, *options))
        for engine in self.engines:
            engine.serving()
        store = WeightStore(root / "w", DiskStore(), self.folders[0], 1 << 20)
        store.open("run", 0, root_of(self.models[0]))
        self.clock, self.store, self.root = RealClock(), store, root

    async def updater(self) -> Updater:
        clients = []
        for engine in self.engines:
            host, port = engine.url.removeprefix("http://").rsplit(":", 1)
            clients.append(EngineClient(f"e{port}", Address(host, int(port)), self.clock))
        made = Updater(GroupTransport(self.store, self.clock, BUCKET), clients, Log(), self.clock)
        (root,) = self.live_roots()  # what an earlier test left
        await made.adopt(WeightVersion(0, 0, root), 20.0)
        return made

    def live_roots(self) -> set[str]:
        """What engines compute anew from live tensors."""
        found = set()
        for engine in self.engines:
            status, row = engine.call("/weights_checker", {"action": "checksum"})
            assert status == 200, row
            found.add(row["per_engine_checksum"])
        return found


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind[0])
def world(request, tmp_path_factory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("world"), *request.param)
    yield made
    for engine in made.engines:
        engine.stop()


def on(world: World, use: Callable[[Updater], Awaitable[None]]) -> None:
    async def main() -> None:
        updater = await world.updater()
        try:
            await use(updater)
        finally:
            for client in updater.fleet.engines.values():
                await client.close()

    asyncio.run(main())


async def update(updater: Updater, tensors: list[HostTensor], deadline_s: float = 60.0) -> WeightVersion:
    begun = updater.begin(lambda: iter(tensors), 1, deadline_s)
    await begun.publish()
    await begun.prepare()
    return await begun.commit()


def needed(tensors: list[HostTensor]) -> tuple[int, int]:
    """Bytes that each of two ranks holds: half of what is divided, all of the rest."""
    rest = [t for t in tensors if "norm" in t.name or t.name.endswith("mlp.gate.weight")]
    total, whole = sum(t.nbytes for t in tensors), sum(t.nbytes for t in rest)
    return (total - whole) // 2 + whole, total


def test_each_rank_is_sent_its_part_and_all_attest_the_whole(world, monkeypatch):
    sent: dict[int, int] = {}
    real = group._send_each

    def counted(backend, parts_, limit):
        for rank, data in parts_:
            sent[rank] = sent.get(rank, 0) + data.numel()
        real(backend, parts_, limit)

    monkeypatch.setattr(group, "_send_each", counted)
    monkeypatch.setattr(group, "_broadcast", None)  # whole tensors go to nobody

    async def use(updater: Updater) -> None:
        for number in (1, 2):
            sent.clear()
            version = await update(updater, world.models[number])
            assert version.root == root_of(world.models[number])
            assert world.live_roots() == {version.root}
            share, total = needed(world.models[number])
            assert sent == dict.fromkeys(range(1, 1 + 2 * len(world.engines)), share)
            assert share <= 0.55 * total

    on(world, use)


def spoiled(tensors: list[HostTensor]) -> list[HostTensor]:
    """The last row of a matrix, which rank 1 holds, is not finite."""
    name = "model.layers.1.self_attn.q_proj.weight"
    made = []
    for tensor in tensors:
        bits = tensor.bits.copy()
        if tensor.name == name:
            bits[-1] = 0x7F80
        made.append(replace(tensor, bits=bits))
    assert any(t.name == name for t in made)
    return made


def test_what_one_rank_refuses_leaves_all_as_they_were_and_the_next_version_comes(world):
    async def use(updater: Updater) -> None:
        version = await update(updater, world.models[1])
        for wrong, said in (
            (spoiled(world.models[2]), "q_proj.weight has 1 values that are NaN or infinite"),
            ([*world.models[2][:-1], renamed(world.models[2][-1])], "is not a tensor of this model"),
        ):
            with pytest.raises(WeightError, match=said):
                await update(updater, wrong)
            assert world.live_roots() == {version.root}
        assert (await update(updater, world.models[2])).root == root_of(world.models[2])
        assert world.live_roots() == {root_of(world.models[2])}

    on(world, use)


def renamed(tensor: HostTensor) -> HostTensor:
    return replace(tensor, name="model.layers.7.input_layernorm.weight")


def test_a_sender_that_stops_between_two_ranks_costs_the_update_only(world, monkeypatch):
    async def use(updater: Updater) -> None:
        version = await update(updater, world.models[1])
        real = group._send_each

        def cut(backend, parts_, limit):
            real(backend, parts_[:1], limit)
            raise WeightError("cut between two ranks")

        with monkeypatch.context() as patch:
            patch.setattr(group, "_send_each", cut)
            with pytest.raises(WeightError, match="cut between two ranks"):
                await update(updater, world.models[2], 30.0)
        assert world.live_roots() == {version.root}
        assert all(engine.process.poll() is None for engine in world.engines)
        assert (await update(updater, world.models[2])).root == root_of(world.models[2])

    on(world, use)
