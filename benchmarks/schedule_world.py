"""A run of the production's control plane over engines and a trainer that compute nothing: the same in virtual time
and with real engine processes.

Everything between the ports is the production's: loop, pool, buffer, book, ledger, sampler, updater, HTTP client.
What is not: engines (turnout.sim.engine, in this process or as benchmarks.paced_engine), a trainer that sleeps,
and a transport whose versions are names. Lengths depend on prompt and seed only, so every schedule has the same
trajectories to make.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import zlib
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.paced_engine import ENDLESS
from benchmarks.tool_reward import tool_seconds
from turnout.config.run_config import RunConfig
from turnout.core.ports import Clock
from turnout.core.rng import SeedTree
from turnout.core.types import Prompt, TrainBatch
from turnout.core.version import WeightVersion
from turnout.placement.real import RealClock
from turnout.rollout.book import GroupBook
from turnout.rollout.ledger import Ledger
from turnout.rollout.ledger_owner import Claim
from turnout.rollout.ledger_schema import open_database
from turnout.rollout.line import QUEUED
from turnout.rollout.rewards import RewardRunner
from turnout.rollout.sampler import Routes, Sampler
from turnout.rollout.source import PromptSource
from turnout.rollout.worker import Generator
from turnout.schedule.control import ControlPlane, World
from turnout.schedule.parts import UpdatePatience, WeightUpdates
from turnout.schedule.phases import Phases
from turnout.serving.address import Address
from turnout.serving.client import EngineClient
from turnout.serving.weights_client import OnUpdate
from turnout.sim.engine import EngineShape, VirtualEngine
from turnout.sim.faults import Faults
from turnout.sim.loop import Life, VirtualClock, VirtualLoop
from turnout.sim.model import length_of, prompt_ids, weights
from turnout.sim.network import VirtualClient, Wire
from turnout.sim.transport import VirtualTransport
from turnout.transfer.transport import Export, Ready
from turnout.transfer.updater import UpdatePolicy, Updater
from turnout.weights.digest import root_of
from turnout.weights.tensors import HostTensor

PROMPT_TOKENS = 4
DEADLINE_S = 1e5
NO_FAULTS = Faults(random.Random(0), ())


@dataclass(frozen=True)
class Setting:
    """`lanes` requests run at once on each of `engines`, each at `speed` tokens a second, in events of `chunk`;
    responses have `median` tokens, at most 20 times that; a train step of `groups` x `samples` takes `train_s`,
    bringing a version to the store `publish_s`; with `tool` one of benchmarks.tool_reward follows each response."""

    engines: int
    lanes: int
    speed: float
    chunk: int
    median: float
    groups: int
    samples: int
    steps: int
    train_s: float
    publish_s: float
    tool: bool = False
    seed: int = 1

    @property
    def options(self) -> dict[str, Any]:
        return {
            "hf_checkpoint": "tiny:llama",
            "prompt_data": "prompts.jsonl",
            "custom_rm_path": "benchmarks.schedule_world:reward",
            "seed": self.seed,
            "num_rollout": self.steps,
            "rollout_batch_size": self.groups,
            "n_samples_per_prompt": self.samples,
            "rollout_max_response_len": int(20 * self.median) + 1,
            "rollout_num_engines": self.engines,
            "rollout_request_timeout_s": DEADLINE_S / 8,
            "reward_timeout_s": DEADLINE_S / 8,
            "rollout_timeout_s": DEADLINE_S,
            "update_weight_timeout_s": DEADLINE_S,
        }

    @property
    def shape(self) -> EngineShape:
        return EngineShape(self.speed, self.chunk, self.lanes, ENDLESS, self.median)

    def seconds(self, tokens: int) -> float:
        """What a response takes on a lane: whole events."""
        return -(-tokens // self.chunk) * self.chunk / self.speed

    def lengths(self) -> list[int]:
        """Tokens of all trajectories of a run that trains groups in their order."""
        node = SeedTree(self.seed)
        return [
            length_of(ordinal, node.child("sample", ordinal, 0).child(member).seed, self.median)
            for ordinal in range(self.steps * self.groups)
            for member in range(self.samples)
        ]


@dataclass
class Outcome:
    """`seconds` to the end of the last train step, the tokens of each trained trajectory in order, the largest lag,
    and what the phases took."""

    seconds: float = 0.0
    lengths: list[int] = field(default_factory=list[int])
    lag: int = 0
    phases: dict[str, float] = field(default_factory=dict[str, float])


class Decoder:
    """A text that differs where token ids do; no token ends one."""

    eos_ids: tuple[int, ...] = ()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        del skip_special_tokens
        return f"{zlib.crc32(array('i', token_ids).tobytes()):08x}"


class PacedTrainer:
    """Sleeps; its weights say how many steps it did. `ended` is when the last step did."""

    def __init__(self, setting: Setting, clock: Clock) -> None:
        self._seconds, self._clock = setting.train_s, clock
        self.ended, self.steps, self.lengths = 0.0, 0, list[int]()

    async def train(self, batch: TrainBatch) -> dict[str, float]:
        await self._clock.sleep(self._seconds)
        self.ended = self._clock.now()
        self.steps += 1
        self.lengths += [len(sample.response_ids) for sample in batch.samples]
        return {"tokens": float(batch.response_tokens), "optimizer_steps": 1.0, "mismatch_mean": 0.0}

    def export(self) -> list[HostTensor]:
        return weights(self.steps.to_bytes(8, "little"))

    @property
    def root(self) -> str:
        return root_of(self.export())


class NamedVersions(VirtualTransport):
    """Versions that are names and digests; writing one takes `publish_s`."""

    def __init__(self, clock: Clock, publish_s: float, on_update: OnUpdate) -> None:
        self._clock, self._publish_s, self._on_update = clock, publish_s, on_update
        self._prepared: dict[str, str] = {}

    async def publish(self, export: Export, train_step: int, deadline_s: float) -> Ready:
        del deadline_s
        version = WeightVersion(0, train_step, root_of(export()))
        await self._clock.sleep(self._publish_s)
        return Ready(version, 16)


class Nothing:
    """The parts that this run has no use for: events, evaluations, checkpoints. Keeps the largest lag."""

    def __init__(self) -> None:
        self.lag = 0

    def emit(self, event: Any) -> None:
        self.lag = max(self.lag, getattr(event, "lag", 0))

    async def run_if_due(self, steps_done: int, last: bool) -> None: ...

    async def settled(self) -> None: ...

    async def caught_up(self, steps_done: int) -> None: ...

    async def close(self) -> None: ...

    def renewed(self) -> None: ...

    def due(self, steps_done: int, last: bool) -> bool:
        del steps_done, last
        return False

    def step(self, batch: Any, metrics: Any, version: Any) -> None: ...


def paced_reward(setting: Setting, clock: Clock) -> Callable[..., Any]:
    """A reward by the response's text, after the tool's time, which is the group's."""

    async def reward(prompt: str, response: str, label: Any) -> float:
        del prompt
        if setting.tool:
            await clock.sleep(tool_seconds(label))
        return int(response[:8], 16) / 0xFFFFFFFF

    return reward


Mend = Callable[[ControlPlane], None]


async def run_plane(
    setting: Setting,
    options: dict[str, Any],
    clients: list[EngineClient],
    place: tuple[Clock, Path | None],
    mend: Mend,
) -> Outcome:
    """One run over these engines. `place`: the clock, and where the ledger lies (None: in memory). `mend` may
    change the control plane before it runs."""
    clock, ledger_file = place
    config = RunConfig.model_validate({**setting.options, **options})
    nothing, trainer, phases = Nothing(), PacedTrainer(setting, clock), Phases(clock)
    policy = UpdatePolicy(drained=config.drains)
    versions = NamedVersions(clock, setting.publish_s, OnUpdate(config.weight_update_policy))
    updater = Updater(versions, clients, nothing, clock, policy)
    fleet, room = updater.fleet, float(QUEUED * setting.lanes * setting.engines)
    routes = Routes(fleet.routable, fleet.standing, fleet.changed, lambda: room)
    sampler = Sampler(routes, Decoder(), clock)
    generator = Generator(sampler, RewardRunner(paced_reward(setting, clock), clock, config.reward_timeout_s))
    count = setting.steps * setting.groups * 2
    prompts = [Prompt(f"p{at}", prompt_ids(at, PROMPT_TOKENS), "", at) for at in range(count)]
    source = PromptSource(prompts, SeedTree(setting.seed), False, None)
    with Ledger(open_database(ledger_file), Claim.of_this_process(clock)) as ledger:
        world = World(
            clock=clock,
            events=nothing,
            source=source,
            generator=generator,
            trainer=trainer,
            weights=WeightUpdates(updater, trainer.export, UpdatePatience(config.update_weight_timeout_s)),
            evaluations=nothing,
            checkpoints=nothing,
            reporter=nothing,
            phases=phases,
        )
        plane = ControlPlane(config, world, GroupBook(nothing, ledger), setting.steps)
        mend(plane)
        base = WeightVersion(0, 0, trainer.root)
        await updater.adopt(base, DEADLINE_S)
        began = clock.now()
        await plane.run(base)
    return Outcome(trainer.ended - began, trainer.lengths, nothing.lag, phases.take())


def unchanged(_plane: ControlPlane) -> None: ...


def run_virtual(setting: Setting, options: dict[str, Any], mend: Mend = unchanged) -> Outcome:
    """In virtual time."""
    loop, clock = VirtualLoop(setting.seed, callbacks_max=1 << 40), VirtualClock()

    class Timers:
        def later(self, seconds: float, call: Callable[..., object], *args: Any) -> Any:
            return loop.call_later(seconds, call, *args)

    async def main() -> Outcome:
        root = PacedTrainer(setting, clock).root
        wire = Wire(NO_FAULTS, Life("benchmark"), Timers().later, lambda *_: None, lambda *_: None)
        engines = [VirtualEngine(f"e{at}", setting.shape, root, Timers()) for at in range(setting.engines)]
        clients: list[EngineClient] = [VirtualClient(engine, clock, wire) for engine in engines]
        return await run_plane(setting, options, clients, (clock, None), mend)

    try:
        return loop.run_until_complete(main())
    finally:
        loop.discard()


def run_real(setting: Setting, options: dict[str, Any], folder: Path, mend: Mend = unchanged) -> Outcome:
    """With engine processes and real time; `folder` gets the ledger."""

    async def main() -> Outcome:
        clock = RealClock()
        async with engine_processes(setting, clock) as clients:
            return await run_plane(setting, options, clients, (clock, folder / "ledger.sqlite"), mend)

    return asyncio.run(main())


@contextlib.asynccontextmanager
async def engine_processes(setting: Setting, clock: Clock) -> AsyncIterator[list[EngineClient]]:
    """Clients of engines that end with the block."""
    shape, root = setting.shape, PacedTrainer(setting, clock).root
    numbers = {"speed": shape.speed, "chunk": shape.chunk, "running": shape.running, "median": shape.median}
    words = [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
    processes: list[asyncio.subprocess.Process] = []
    clients: list[EngineClient] = []
    try:
        for at in range(setting.engines):
            command = [sys.executable, "-m", "benchmarks.paced_engine", f"e{at}", *words, "--root", root]
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
            processes.append(process)
            assert process.stdout is not None
            port = int(await clock.within(60.0, "an engine's port", process.stdout.readline()))
            clients.append(EngineClient(f"e{at}", Address("127.0.0.1", port), clock))
        yield clients
    finally:
        for client in clients:
            await client.close()
        for process in processes:
            process.kill()
            await process.wait()
