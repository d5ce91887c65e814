"""Weight updates of real engines that fail, each in one way: what is committed, what engines hold, how they heal.

A proxy before one of two engines makes it fail; what an engine really holds is asked behind the proxy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine_models import make_model
from tests.engine_process import EngineProcess, engine, two_engines
from tests.lying_engine import Ask, Lie, LyingEngine, Passed, Row
from tests.unit.rollout.parts import Log
from turnout.core.errors import WeightError
from turnout.core.events import EngineFenced, VersionPublished
from turnout.core.version import WeightVersion
from turnout.observe.audit_versions import engines_activate_what_they_prepared, tentative_engines_are_fenced
from turnout.placement.real import DiskStore, RealClock
from turnout.serving.address import Address
from turnout.serving.client import EngineClient
from turnout.transfer.disk import DiskTransport
from turnout.transfer.group import GroupTransport
from turnout.transfer.transport import Transport
from turnout.transfer.updater import UpdatePolicy, Updater
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.digest import root_of
from turnout.weights.store import WeightStore

FLAGS = ("--max-total-tokens", "4096", "--max-step-tokens", "64", "--update-timeout-s", "4")
PREPARE, ACTIVATE, GROUP = "/prepare_weights", "/activate_weights", "/update_weights_from_distributed"
BUCKET = 1 << 20
Means = Callable[[str, Row, Ask], Awaitable[Row | Passed]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [make_model(root / f"m{seed}", "llama", torch.bfloat16, seed) for seed in range(4)]


@pytest.fixture(scope="module")
def engines(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    yield from two_engines(models[0], tmp_path_factory, *FLAGS)


@dataclass
class Deployment:
    """Two engines, the second behind a proxy that does what `fault` says, by path, as often as it is listed."""

    updater: Updater
    log: Log
    real: list[EngineProcess]
    models: list[Path]
    faults: dict[str, list[Means]] = field(default_factory=dict)

    async def update(self, step: int, deadline_s: float = 30.0) -> WeightVersion:
        update = self.updater.begin(lambda: read_checkpoint(self.models[step]), step, deadline_s)
        await update.publish()
        await update.prepare()
        return await update.commit()

    def root(self, step: int) -> str:
        return root_of(read_checkpoint(self.models[step]))

    def held(self) -> list[str]:
        """What the engines really hold."""
        return [process.call("/weight_version")[1]["root"] for process in self.real]

    def check(self) -> None:
        """Whoever may be asked holds the current version, in its memory."""
        current = self.updater.current
        assert current is not None
        held = {f"e{at}": root for at, root in enumerate(self.held())}
        for client in self.updater.fleet.routable():
            assert held[client.engine_id] == current.root


def deploy(
    engines: list[EngineProcess],
    models: list[Path],
    folder: Path,
    use: Callable[[Deployment], Awaitable[None]],
    transport: str = "disk",
    min_engines: int = 1,
) -> None:
    async def main() -> None:
        faults: dict[str, list[Means]] = {}

        async def lie(path: str, body: Row, ask: Ask) -> Row | Passed:
            line = faults.get(path)
            return await line.pop(0)(path, body, ask) if line else body

        for process in engines:
            flags = {"model_path": str(models[0]), "weight_version": "default"}
            assert process.call("/update_weights_from_disk", flags)[0] == 200
        async with LyingEngine(engines[1].url, Lie(request=lie)) as proxy:
            clock, log = RealClock(), Log()
            urls = (engines[0].url, proxy.url)
            clients = [EngineClient(f"e{at}", address_of(url), clock) for at, url in enumerate(urls)]
            base = WeightVersion(0, 0, root_of(read_checkpoint(models[0])))
            store = WeightStore(folder / "w", DiskStore(), models[0], BUCKET)
            store.open("run", 0, base.root)
            way: Transport = (
                DiskTransport(store, clock) if transport == "disk" else GroupTransport(store, clock, BUCKET)
            )
            updater = Updater(way, clients, log, clock, UpdatePolicy(min_engines=min_engines))
            await updater.adopt(base, 20.0)
            deployment = Deployment(updater, log, engines, models, faults)
            try:
                await asyncio.wait_for(use(deployment), 60)
            finally:
                for client in clients:
                    await client.close()
            for rule in (engines_activate_what_they_prepared, tentative_engines_are_fenced):
                assert list(rule(log.events)) == []

    asyncio.run(main())


def address_of(url: str) -> Address:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return Address(host, int(port))


async def says_500(_path: str, _body: Row, _ask: Ask) -> Passed:
    return Passed(500, {"success": False, "message": "planted"})


async def does_it_and_says_500(path: str, body: Row, ask: Ask) -> Passed:
    await ask(path, body)
    return Passed(500, {"success": False, "message": "planted"})


async def does_it_twice(path: str, body: Row, ask: Ask) -> Passed:
    first = await ask(path, body)
    await ask(path, body)
    return Passed(*first)


async def does_it_late(path: str, body: Row, ask: Ask) -> Passed:
    await asyncio.sleep(2.5)
    return Passed(*await ask(path, body))


def test_an_engine_that_answers_failure_stops_an_update_that_needs_it(
    engines: list[EngineProcess], models: list[Path], tmp_path: Path
) -> None:
    async def use(d: Deployment) -> None:
        d.faults[PREPARE] = [says_500]
        with pytest.raises(WeightError, match=r"e1 .*planted"):
            await d.update(1)
        assert d.held() == [d.root(0)] * 2 and d.updater.fleet.fenced == {"e1"}
        d.check()
        d.faults[ACTIVATE] = [says_500]
        with pytest.raises(WeightError, match=r"e1 .*planted"):
            await d.update(1)
        assert d.updater.fleet.fenced == {"e0", "e1"}  # e0 holds a version that was never committed
        assert d.held() == [d.root(1), d.root(0)]
        version = await d.update(2)
        assert version.counter == 3 and d.held() == [version.root] * 2
        d.check()

    deploy(engines, models, tmp_path, use, min_engines=2)


@pytest.mark.parametrize("fault", [says_500, does_it_and_says_500, does_it_late])
def test_with_enough_engines_left_it_goes_on_and_the_next_update_heals(
    fault: Means, engines: list[EngineProcess], models: list[Path], tmp_path: Path
) -> None:
    async def use(d: Deployment) -> None:
        d.faults[ACTIVATE] = [fault]
        version = await d.update(1, 2.0)
        assert version.root == d.root(1) == d.held()[0]
        assert d.updater.fleet.fenced == {"e1"} and len(d.log.of(EngineFenced)) == 1
        d.check()
        if fault is does_it_late:
            await asyncio.sleep(1.5)  # the late answer comes between the updates
        d.check()
        version = await d.update(2)
        assert d.held() == [version.root] * 2 and d.updater.fleet.fenced == set()
        d.check()

    deploy(engines, models, tmp_path, use)


def test_an_activation_that_comes_twice_is_one(
    engines: list[EngineProcess], models: list[Path], tmp_path: Path
) -> None:
    async def use(d: Deployment) -> None:
        d.faults[ACTIVATE], d.faults[PREPARE] = [does_it_twice], [does_it_twice]
        with pytest.raises(WeightError, match="no set"):  # the second preparation replaced the first
            await d.update(1)
        d.faults[ACTIVATE] = [does_it_twice]
        version = await d.update(2)
        assert d.held() == [version.root] * 2
        d.check()

    deploy(engines, models, tmp_path, use, min_engines=2)


def test_a_failed_broadcast_leaves_the_others_a_group_of_their_own(
    engines: list[EngineProcess], models: list[Path], tmp_path: Path
) -> None:
    """The group is made anew without the engine that failed, and again with it at the next update."""

    async def use(d: Deployment) -> None:
        await d.update(1)
        d.faults[GROUP] = [says_500]
        version = await d.update(2)
        assert d.held() == [version.root, d.root(1)] and d.updater.fleet.fenced == {"e1"}
        d.check()
        version = await d.update(3)
        assert d.held() == [version.root] * 2 and d.updater.fleet.fenced == set()
        assert [event.required for event in d.log.of(VersionPublished)] == [["e0", "e1"]] * 3
        d.check()

    deploy(engines, models, tmp_path, use, transport="group")


def test_wgt_32_an_engine_that_dies_before_it_attests_and_starts_again_joins(
    engines: list[EngineProcess], models: list[Path], tmp_path: Path
) -> None:
    """It is dropped, the version is committed without it; its successor loads that version and attests it."""
    allowed = ("--allowed-root", str(tmp_path.parent))
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with engine(models[0], tmp_path / "first", *FLAGS, *allowed) as mortal:

        async def dies(path: str, body: Row, ask: Ask) -> Passed:
            await ask(path, body)
            mortal.process.kill()
            mortal.process.wait(30)
            return Passed(502, {"message": "gone"})

        async def use(d: Deployment) -> None:
            d.faults[ACTIVATE] = [dies]
            version = await d.update(1)
            assert d.updater.fleet.fenced == {"e1"}
            assert [client.engine_id for client in d.updater.fleet.routable()] == ["e0"]
            with engine(models[0], tmp_path / "second", *FLAGS, *allowed) as successor:
                d.real[1] = successor
                client = EngineClient("e1", address_of(successor.url), RealClock())
                assert d.held()[1] == d.root(0)
                assert await d.updater.join(client, 20.0)
                assert d.held() == [version.root] * 2 and client.version == version.label
                d.check()
                await client.close()

        deploy([engines[0], mortal], models, tmp_path, use)
