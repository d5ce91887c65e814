"""Ranks that a cluster starts on other machines: which folders they must share, what they see, who is named."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from turnout.core.errors import ConfigError, EngineError, TrainerLost
from turnout.placement.cluster import LOOPBACK, Place, Process, Starter, Told
from turnout.placement.devices import VISIBLE
from turnout.placement.real import RealClock
from turnout.protocol.folder_probe import probe_file
from turnout.train import rank_start
from turnout.train.rank_launch import RankPlan, start_ranks
from turnout.train.rank_start import RankStart, answer_file, command_of, start_rank
from turnout.train.rank_wire import BACK, hello

HOST = "10.0.0.7"


class Nowhere:
    """A process that has not ended."""

    pid, alive, state = None, True, ""

    async def ended(self) -> str:
        await asyncio.Event().wait()
        return ""

    def kill(self) -> None:
        self.alive = False

    async def stop(self, grace_s: float) -> None:
        self.alive = False


class Nodes:
    """A cluster whose nodes do what `node` does in place of the starter."""

    here = LOOPBACK

    def __init__(self, node: Callable[[RankStart], Awaitable[None]]) -> None:
        self._node, self.places, self.made = node, list[Place](), list[Nowhere]()

    async def open(self) -> None: ...

    async def start(self, place: Place, starter: Starter, deadline_s: float) -> tuple[Process, Told]:
        self.places.append(place)
        start: RankStart = cast("Any", starter).args[0]
        await self._node(start)
        self.made.append(Nowhere())
        return self.made[-1], {
            "name": f"trainer rank {start.rank} (cpu:{start.rank} of {HOST})",
            "host": HOST,
        }

    async def close(self) -> list[str]:
        return []


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_start, "LATE_S", 0.05)
    monkeypatch.setattr(rank_start, "POLL_S", 0.01)


def start_in(folder: Path, **values: Any) -> RankStart:
    shared = (("--run-dir", folder / "run"), ("--save", folder / "save"))
    return replace(RankStart(0, (LOOPBACK, 1), "t" * 64, 1, folder, "", shared, "a" * 32), **values)


def test_every_folder_that_a_node_does_not_share_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is another there, one where nothing can be written."""
    (tmp_path / "save").mkdir()
    probe_file(tmp_path / "save", "a" * 32).touch()

    def full(*_: object) -> Path:
        return tmp_path / "no folder" / "answer"

    monkeypatch.setattr(rank_start, "answer_file", full)
    with pytest.raises(ConfigError) as refused:
        asyncio.run(start_rank(start_in(tmp_path), HOST, RealClock()))
    found = {fault.where: fault.reason for fault in refused.value.faults}
    assert f"shared with the trainer's node {HOST}: a file that the controller wrote" in found["--run-dir"]
    assert "nothing can be written there: No such file" in found["--save"]


def test_a_controller_that_does_not_see_what_a_node_wrote_says_so_and_keeps_nothing(tmp_path: Path) -> None:
    seen: list[bool] = []

    async def node(start: RankStart) -> None:
        seen.append(all(probe_file(folder, start.probe).exists() for _, folder in start.shared))
        answer_file(tmp_path / "run", start.probe, start.rank).touch()

    nodes = Nodes(node)
    plan = RankPlan(2, 1, tmp_path / "run", 5.0, shared=start_in(tmp_path).shared)
    with pytest.raises(ConfigError) as refused:
        asyncio.run(start_ranks(plan, RealClock(), nodes))
    assert seen == [True, True] and not any(one.alive for one in nodes.made)
    (fault,) = refused.value.faults
    assert fault.where == "--save" and "does not show here" in fault.reason
    assert [*(tmp_path / "run").iterdir(), *(tmp_path / "save").iterdir()] == []


def test_a_node_where_a_rank_can_not_start_is_the_trainer_s_loss(tmp_path: Path) -> None:
    async def node(start: RankStart) -> None:
        raise EngineError(f"trainer-rank-{start.rank}", "start", "none", f"node {HOST}: no such program")

    nodes = Nodes(node)
    with pytest.raises(TrainerLost, match=rf"trainer-rank-\d: node {HOST}: no such program"):
        asyncio.run(start_ranks(RankPlan(2, 1, tmp_path, 5.0), RealClock(), nodes))
    assert [place.name for place in nodes.places] == ["trainer-rank-0", "trainer-rank-1"]


def test_a_rank_that_does_not_connect_is_named(tmp_path: Path) -> None:
    async def node(start: RankStart) -> None:
        for _, folder in start.shared:
            answer_file(folder, start.probe, start.rank).touch()
        for number in (0, BACK) if start.rank == 0 else ():
            _, writer = await asyncio.open_connection(*start.controller)
            writer.write(hello(number, start.token))
            await writer.drain()

    plan = RankPlan(2, 1, tmp_path / "run", 0.5, shared=start_in(tmp_path).shared)
    with pytest.raises(TrainerLost) as lost:
        asyncio.run(start_ranks(plan, RealClock(), Nodes(node)))
    assert f"trainer rank 1 (cpu:1 of {HOST}); see the logs" in str(lost.value)
    assert "rank 0" not in str(lost.value)


def test_rank_0_alone_gives_tensors_back_and_only_from_elsewhere(tmp_path: Path) -> None:
    words = [command_of(start_in(tmp_path, rank=rank), HOST) for rank in (0, 1)]
    words.append(command_of(start_in(tmp_path, shared=(), probe=""), LOOPBACK))
    assert ["--give-back" in one for one in words] == [True, False, False]
    assert words[0][words[0].index("--host") + 1] == HOST


@pytest.mark.parametrize(
    ("device", "given", "sees", "named"),
    [
        ("", "", "", "cpu:1 of 10.0.0.7"),
        ("", "3", "3", "cuda:3 of 10.0.0.7"),
        ("cpu:1", "4,5", "", "cpu:1"),
        ("cuda:1", "4,5", "5", "cuda:1"),
    ],
)
def test_a_rank_sees_its_own_gpu(
    device: str, given: str, sees: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE, given)
    monkeypatch.setattr(rank_start, "command_of", lambda *_: ["sh", "-c", f"echo seen=${VISIBLE}"])

    async def main() -> tuple[str, str]:
        process, told = await start_rank(
            start_in(tmp_path, rank=1, device=device, shared=()), HOST, RealClock()
        )
        return await process.ended(), told["name"]

    ended, name = asyncio.run(main())
    assert name == f"trainer rank 1 ({named})" and ended.endswith(f"ends: seen={sees}"), ended
