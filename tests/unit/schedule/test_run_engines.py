"""Engines that come, end and leave while a run works: what is waited for, kept, and given an id."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.rollout.parts import Log
from turnout.core.errors import ConfigError, DeadlineExceeded, EngineDead, EngineError, WeightError
from turnout.core.waits import Waits
from turnout.placement.processes import STOPPED
from turnout.placement.real import RealClock
from turnout.schedule import engine_starts
from turnout.schedule.engine_changes import EngineChanges, Limits, Refused
from turnout.schedule.engine_lives import Around, Care, Probes
from turnout.schedule.run_engines import RunEngines
from turnout.serving.address import Address
from turnout.serving.client import EngineClient
from turnout.serving.launcher import Engine
from turnout.serving.roster import EnginePlan, Program, WorkerType, sides
from turnout.serving.sglang_launcher import SglangLaunch
from turnout.weights.quorum import Sides

PREFILL = EnginePlan("prefill-0", worker_type=WorkerType.PREFILL)
DECODE = EnginePlan("decode-0", worker_type=WorkerType.DECODE)
PROBES = Probes(1000.0, 1000.0, first_wait_s=1000.0)


class Quick(RealClock):
    """The pauses before a restart are short; a probe never comes."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds if seconds > 100 else 0.01)


class Process:
    """One that ends when `end` is set, and stops at its first try where it does not hang."""

    pid, state, hangs, stops = None, "", False, 0

    def __init__(self) -> None:
        self.end = asyncio.Event()

    @property
    def alive(self) -> bool:
        return not self.end.is_set()

    async def ended(self) -> str:
        await self.end.wait()
        return "it ended"

    async def stop(self, grace_s: float) -> None:
        self.stops += 1
        if self.hangs:
            await asyncio.Event().wait()
        self.end.set()


class Kept(Engine):
    """One whose lease is renewed."""

    def __init__(self, process: Any, client: EngineClient, renewed: list[str]) -> None:
        super().__init__(process, client)
        self.renewed = renewed

    async def keep(self, timeout_s: float) -> None:
        self.renewed.append(self.engine_id)


@dataclass
class World:
    """Engines, the faults that their next starts meet, and what is told of them."""

    faults: list[Exception] = field(default_factory=list)
    processes: dict[str, Process] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)
    renewed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = Quick()
        self.engines = RunEngines(self._start, Log(), self.clock, Waits(self.clock.now))

    async def _start(self, plan: EnginePlan) -> Engine:
        if self.faults:
            raise self.faults.pop(0)
        client = EngineClient(plan.engine_id, Address("127.0.0.1", 9), self.clock)
        client.plan, process = plan, Process()
        self.processes[plan.engine_id] = process
        return Kept(process, client, self.renewed)

    async def _joins(self, client: EngineClient) -> None:
        client.holds = Any  # type: ignore[assignment]  # whatever it is
        self.joined.append(client.engine_id)

    def changes(self, **updater: Callable[..., Awaitable[Any]]) -> EngineChanges:
        async def leave(*_: object) -> None: ...

        around: Any = SimpleNamespace(**{"clock": self.clock, "leave": leave} | updater)
        return EngineChanges(self.engines, around, Log(), Limits(1, 5.0))

    def run(
        self,
        plans: list[EnginePlan],
        work: Awaitable[Any],
        needed: Mapping[str, tuple[int, Sides]] | None = None,
        probes: Probes = PROBES,
        changing: bool = False,
    ) -> None:
        async def main() -> None:
            await self.engines.begin(plans, 1)
            for client in self.engines.updated:
                await self._joins(client)
            around = Around(
                lambda: "rollout",
                lambda d, _: self.lost.append(d.engine_id),
                self._joins,
                lambda _: "",
                lambda _: changing,
            )
            try:
                await self.engines.during(
                    self._of(work), Care(probes, 0, needed or {"default": (1, ())}), around
                )
            finally:
                await self.engines.stop()

        asyncio.run(asyncio.wait_for(main(), 20))

    async def _of(self, work: Awaitable[Any]) -> None:
        await work

    async def until(self, done: Callable[[], bool]) -> None:
        while not done():
            await self.clock.sleep(0.01)


def test_the_halves_of_a_run_are_those_of_the_engines_it_has_now() -> None:
    world = World()

    async def work() -> None:
        await world.engines.add(replace(DECODE, engine_id="decode-1"))
        await world.engines.remove("decode-0")
        await world.engines.add(replace(PREFILL, engine_id="prefill-1"))
        world.processes["prefill-1"].end.set()
        await world.until(lambda: world.lost == ["prefill-1"])
        world.processes["decode-1"].end.set()
        await world.until(lambda: False)

    needed = {"default": (1, sides([PREFILL, DECODE]))}
    with pytest.raises(EngineDead, match="decode-1"):
        world.run([PREFILL, DECODE], work(), needed)
    assert world.lost == ["prefill-1"]


def test_an_engine_that_hangs_as_it_leaves_is_stopped_with_the_run() -> None:
    world = World()

    async def work() -> None:
        world.processes["engine-0"].hangs = True
        leaving = asyncio.ensure_future(world.engines.remove("engine-0"))
        await world.until(lambda: world.processes["engine-0"].stops == 1)
        assert world.engines.up() == ["engine-1"]
        leaving.cancel()
        world.processes["engine-0"].hangs = False

    world.run([EnginePlan("engine-0"), EnginePlan("engine-1")], work())
    assert not world.processes["engine-0"].alive


def test_an_external_engine_that_is_late_is_asked_on_without_restarts() -> None:
    world = World()
    late = EnginePlan("host1:1", program=Program.EXTERNAL, address="http://host1:1")

    async def work() -> None:
        world.faults = [EngineError("host1:1", "start", "none", "no answer")] * 3
        world.engines.expect(late)
        await world.until(lambda: "host1:1" in world.joined)

    world.run([EnginePlan("engine-0")], work())
    assert world.lost == ["host1:1"] * 3


def test_the_id_of_an_engine_that_left_is_not_given_again() -> None:
    world = World()

    async def work() -> None:
        changes = world.changes()
        await changes.remove("engine-1", "")
        await changes.add_own(1)

    world.run([EnginePlan("engine-0"), EnginePlan("engine-1")], work())
    assert list(world.engines.plans) == ["engine-0", "engine-2"]


def test_an_engine_stays_where_the_others_ended_while_it_left() -> None:
    world = World()
    back: list[str] = []

    async def work() -> None:
        async def leave(*_: object) -> None:
            world.processes["engine-1"].end.set()
            await world.until(lambda: world.lost == ["engine-1"])

        async def join(client: EngineClient, _: float) -> None:
            back.append(client.engine_id)

        with pytest.raises(Refused, match="engine engine-0 stays"):
            await world.changes(leave=leave, join=join).remove("engine-0", "")
        assert world.processes["engine-0"].alive

    world.run([EnginePlan("engine-0"), EnginePlan("engine-1")], work())
    assert back == ["engine-0"]


def launched(plan: EnginePlan, external: Any = None) -> Any:
    run: Any = SimpleNamespace(config=SimpleNamespace(engine_start_timeout_s=1.0, update_weight_mode="full"),
                               paths=SimpleNamespace(engines=None, weights=None), clock=RealClock(),
                               token=None, cluster=None)  # fmt: skip
    inputs: Any = SimpleNamespace(model=None)
    return asyncio.run(engine_starts.launched(run, inputs, external, plan))


@pytest.mark.parametrize(
    "fault", [OSError(28, "No space left on device"), DeadlineExceeded("python to say", 60)]
)
def test_whatever_keeps_an_engine_from_starting_is_a_fault_of_that_engine(
    fault: Exception, monkeypatch: Any
) -> None:
    async def fails(*_: object) -> None:
        raise fault

    monkeypatch.setattr(engine_starts, "launch_sglang", fails)
    server = SglangLaunch("engine-0", Path(), Path(), "float32", Path(), 1.0)
    monkeypatch.setattr(engine_starts.wiring, "sglang_launch", lambda *_: server)
    with pytest.raises(EngineError, match=r"engine engine-0 failed in phase start.*(No space|to say)"):
        launched(EnginePlan("engine-0", program=Program.SGLANG))


@pytest.mark.parametrize(
    ("fault", "raised"),
    [(EngineDead("host1:1", "start", "none", "cut"), EngineDead), (WeightError("no such mode"), ConfigError)],
)
def test_an_external_engine_that_is_not_used_is_let_go(
    fault: Exception, raised: type, monkeypatch: Any
) -> None:
    stopped: list[bool] = []

    async def stop() -> None:
        stopped.append(True)

    async def connect(*_: object) -> Any:
        return SimpleNamespace(client=None, stop=stop)

    async def fails(*_: object) -> None:
        raise fault

    monkeypatch.setattr(engine_starts, "check_engines", fails)
    with pytest.raises(raised):
        launched(EnginePlan("host1:1", program=Program.EXTERNAL), SimpleNamespace(connect=connect))
    assert stopped == [True]


@pytest.mark.parametrize("stopped", [True, False])
def test_an_engine_that_is_probed_in_an_update_is_one_whose_process_stands_still(stopped: bool) -> None:
    """A probe of one that works could be late; one that is stopped held the update to its deadline."""
    world = World()  # no probe is answered: nothing listens there

    async def work() -> None:
        if stopped:
            world.processes["engine-0"].state = STOPPED
            await world.until(lambda: world.lost == ["engine-0"])
        else:
            await asyncio.sleep(0.5)  # some fifty probes' time
            await world.until(lambda: {*world.renewed} == {"engine-0", "engine-1"})

    plans = [EnginePlan("engine-0"), EnginePlan("engine-1")]
    world.run(plans, work(), probes=Probes(1.0, 1.0), changing=True)
    assert world.lost == ["engine-0"] * stopped
