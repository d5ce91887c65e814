"""What a run makes of a Ray that does not answer, with stand-ins for Ray's own functions; the real one is in
tests/process/test_ray.py."""

from __future__ import annotations

import asyncio
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from turnout.core.errors import EngineError
from turnout.placement.cluster import Place, Process, closed
from turnout.placement.ray_cluster import RayCluster, RayPlan
from turnout.placement.real import RealClock

ADDED = Place("engine-1")


class RayError(Exception):
    """As that of ray.exceptions: no RuntimeError."""


class Actor:
    """One that has a process; `stop` ends it."""

    def __init__(self, answers: bool) -> None:
        self._end, self._answers = asyncio.Event(), answers

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *_: self._call(name))

    async def _call(self, name: str) -> Any:
        if name == "where" and not self._answers:
            await asyncio.Event().wait()
        if name == "ended":
            await self._end.wait()
        if name == "stop":
            self._end.set()
        return {"where": "10.0.0.1", "start": (7, {"url": "u"}), "ended": "it ended"}.get(name)


class Ray(ModuleType):
    """`fails`: the functions that raise; `done`: what was asked for; `answers`: of actors that begin now."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.__spec__ = ModuleSpec("ray", None)
        self.fails: set[str] = set()
        self.done: list[str] = []
        self.answers = True
        self.exceptions = SimpleNamespace(RayError=RayError)
        strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda *_, **__: None)
        self.util = SimpleNamespace(
            placement_group=lambda _, strategy, name: self._did("placement_group", name),
            placement_group_table=lambda _: self._did(
                "table", {"state": "CREATED", "bundles_to_node_id": {0: "n"}}
            ),
            get_node_ip_address=lambda: "10.0.0.1",
            remove_placement_group=lambda group: self._did("remove", group),
        )
        self.modules = {"ray": self, "ray.exceptions": self.exceptions}
        self.modules["ray.util.scheduling_strategies"] = strategies

    def _did(self, name: str, value: Any) -> Any:
        self.done.append(f"{name} {value}" if isinstance(value, str) else name)
        if name in self.fails:
            raise RayError(f"{name}: no answer")
        return value

    def init(self, **_: Any) -> None:
        self._did("init", None)

    def nodes(self) -> Any:
        return self._did("nodes", [{"NodeID": "n", "NodeManagerAddress": "10.0.0.1", "Alive": True}])

    def kill(self, _: Actor) -> None:
        self._did("kill", None)

    def shutdown(self) -> None:
        self._did("shutdown", None)

    def remote(self, _: type) -> Any:
        made = SimpleNamespace(remote=lambda *_: Actor(self.answers))
        return SimpleNamespace(options=lambda **_: made)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    found = Ray()
    for name, module in found.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return found


async def cluster_at(folder: Path, deadline_s: float = 60.0) -> RayCluster:
    plan = RayPlan("10.0.0.1:1", "x", (Place("engine-0"),), deadline_s, folder, 1)
    cluster = RayCluster(plan, RealClock())
    await cluster.open()
    return cluster


async def started(cluster: RayCluster, place: Place) -> Process:
    async def starter(*_: object) -> Any: ...

    return (await cluster.start(place, starter, 60.0))[0]


def test_an_added_engine_is_stopped_again_where_its_restart_failed(ray: Ray, tmp_path: Path) -> None:
    async def main() -> None:
        cluster = await cluster_at(tmp_path)
        first = await started(cluster, ADDED)
        await first.stop(1.0)
        ray.fails = {"table"}
        with pytest.raises(EngineError, match="no answer"):
            await started(cluster, ADDED)
        assert ray.done.count("remove turnout-x-engine-1") == 2, "nothing is left of the failed start"
        await first.stop(1.0)
        ray.fails = set()
        second = await started(cluster, ADDED)
        await first.stop(1.0)
        assert "engine-1" in cluster._bundles and second.alive
        assert await cluster.close() == []

    asyncio.run(main())


def test_a_ray_that_fails_ends_neither_a_stop_nor_a_restart(ray: Ray, tmp_path: Path) -> None:
    async def main() -> None:
        cluster = await cluster_at(tmp_path, deadline_s=0.05)
        process = await started(cluster, Place("engine-0"))
        ray.fails = {"kill"}
        await process.stop(1.0)
        assert not process.alive
        ray.answers = False
        with pytest.raises(EngineError, match=r"a node for engine-0"):
            await started(cluster, Place("engine-0"))
        ray.fails = {"placement_group"}
        with pytest.raises(EngineError, match="no answer"):
            await started(cluster, ADDED)
        assert await cluster.close() == []

    asyncio.run(main())


def test_what_can_not_be_taken_down_is_told_and_the_rest_is(ray: Ray, tmp_path: Path) -> None:
    async def main() -> None:
        cluster = await cluster_at(tmp_path)
        ray.fails = {"remove"}
        assert await closed(cluster) == ["a group to be removed: RayError: remove: no answer"]
        assert ray.done[-1] == "shutdown"

    asyncio.run(main())
