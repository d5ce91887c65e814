"""A run of the production's control plane over engines and a trainer that compute nothing but take their time.

Everything between the ports is the production's: loop, pool, buffer, book, ledger, sampler, updater. What is not:
engines (turnout.sim.engine here, or any clients), a trainer that sleeps, and a transport whose versions are names.
Lengths depend on prompt and seed only, so every schedule has the same trajectories to make. Used by `turnout plan`
in virtual time, and by the benchmarks also with engine processes on real time.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnout.config.run_config import RunConfig
from turnout.core.ports import Clock
from turnout.core.rng import SeedTree
from turnout.core.types import Prompt, TrainBatch
from turnout.core.version import WeightVersion
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
from turnout.serving.client import EngineClient
from turnout.serving.weights_client import OnUpdate
from turnout.sim.engine import VirtualEngine
from turnout.sim.faults import Faults
from turnout.sim.loop import Life, VirtualClock, VirtualLoop
from turnout.sim.model import EngineShape, prompt_ids, weights
from turnout.sim.network import CHANGE_S, FASTEST_S, SLOWEST_S, VirtualClient, Wire
from turnout.sim.transport import VirtualTransport
from turnout.transfer.transport import Export, Ready
from turnout.transfer.updater import UpdatePolicy, Updater
from turnout.weights.digest import root_of
from turnout.weights.tensors import HostTensor

PROMPT_TOKENS = 4
DEADLINE_S = 1e5
SLICES = 8  # of a train step, for each of which it is looked who else computes


@dataclass(frozen=True)
class Pace:
    """`engines` of this `shape`; a train step takes `train_s`, and `train_token_s` for each response token;
    bringing a version to the store takes `publish_s`, to the engines `prepare_s`. `sharing`: how many times as long
    either half takes while the other one computes as well. `steps` are run. `way_s` and `change_s`: how long a
    message and a call that changes weights take, at least and at most. `tick_s`: how often it is noted how many
    requests run (None: never)."""

    engines: int
    shape: EngineShape
    train_s: float
    publish_s: float
    steps: int
    prepare_s: float = 0.0
    sharing: float = 1.0
    train_token_s: float = 0.0
    seed: int = 1
    way_s: tuple[float, float] = (FASTEST_S, SLOWEST_S)
    change_s: tuple[float, float] = CHANGE_S
    tick_s: float | None = None


@dataclass
class Outcome:
    """`seconds` to the end of the last train step, the tokens of each trained trajectory in order, the largest lag,
    and what the phases took. `steps` are (begin, end) of each train step, `lags` those of groups by step, `running`
    how many requests ran at what time."""

    seconds: float = 0.0
    lengths: list[int] = field(default_factory=list[int])
    lag: int = 0
    phases: dict[str, float] = field(default_factory=dict[str, float])
    steps: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    lags: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    running: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])


class Decoder:
    """A text that differs where token ids do; no token ends one."""

    eos_ids: tuple[int, ...] = ()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        del skip_special_tokens
        return f"{zlib.crc32(array('i', token_ids).tobytes()):08x}"


class PacedTrainer:
    """Sleeps; its weights say how many steps it did. `ended` is when the last step did."""

    def __init__(self, pace: Pace, clock: Clock, engines: Sequence[VirtualEngine] = ()) -> None:
        self._pace, self._clock, self._engines = pace, clock, engines
        self.ended, self.steps, self.lengths = 0.0, 0, list[int]()
        self.spans: list[tuple[float, float]] = []

    async def train(self, batch: TrainBatch) -> dict[str, float]:
        began, tokens = self._clock.now(), batch.response_tokens
        seconds = self._pace.train_s + self._pace.train_token_s * tokens
        if self._pace.sharing == 1.0:
            await self._clock.sleep(seconds)
        else:
            await self._shared(seconds)
        self.ended = self._clock.now()
        self.spans.append((began, self.ended))
        self.steps += 1
        self.lengths += [len(sample.response_ids) for sample in batch.samples]
        return {"tokens": float(tokens), "optimizer_steps": 1.0, "mismatch_mean": 0.0}

    async def _shared(self, seconds: float) -> None:
        """Both halves take longer while both compute."""
        for engine in self._engines:
            engine.slowed = self._pace.sharing
        for _ in range(SLICES):
            busy = sum(bool(engine.running) for engine in self._engines) / max(1, len(self._engines))
            factor = 1.0 + (self._pace.sharing - 1.0) * busy
            await self._clock.sleep(seconds * factor / SLICES)
        for engine in self._engines:
            engine.slowed = 1.0

    def export(self) -> list[HostTensor]:
        return weights(self.steps.to_bytes(8, "little"))

    @property
    def root(self) -> str:
        return root_of(self.export())

    async def digest(self) -> str:
        return self.root


class NamedVersions(VirtualTransport):
    """Versions that are names and digests; writing one takes `publish_s`, bringing it to engines `prepare_s`."""

    def __init__(self, clock: Clock, pace: Pace, on_update: OnUpdate) -> None:
        self._clock, self._pace, self._on_update = clock, pace, on_update
        self._prepared: dict[str, str] = {}

    async def publish(self, export: Export, train_step: int, deadline_s: float) -> Ready:
        del deadline_s
        version = WeightVersion(0, train_step, root_of(export()))
        await self._clock.sleep(self._pace.publish_s)
        return Ready(version, 16)

    async def prepare(
        self, ready: Ready, export: Export, engines: Sequence[EngineClient], deadline_s: float
    ) -> dict[str, Exception | None]:
        await self._clock.sleep(self._pace.prepare_s)
        return await super().prepare(ready, export, engines, deadline_s)


class Nothing:
    """The parts that this run has no use for: events, evaluations, checkpoints. Keeps the lags of groups."""

    def __init__(self) -> None:
        self.lag = 0
        self.lags: list[tuple[int, int]] = []

    def emit(self, event: Any) -> None:
        lag = getattr(event, "lag", None)
        if lag is not None:
            self.lag = max(self.lag, lag)
            self.lags.append((event.step, lag))

    async def run_if_due(self, steps_done: int, last: bool) -> None: ...

    async def settled(self) -> None: ...

    async def caught_up(self, steps_done: int) -> None: ...

    async def close(self) -> None: ...

    def renewed(self) -> None: ...

    def due(self, steps_done: int, last: bool) -> bool:
        del steps_done, last
        return False

    def step(self, batch: Any, metrics: Any, version: Any) -> None: ...


Mend = Callable[[ControlPlane], None]
Wait = Callable[[Any], Awaitable[None]]


def unchanged(_plane: ControlPlane) -> None: ...


async def no_wait(_label: Any) -> None: ...


@dataclass(frozen=True)
class Place:
    """Where a run goes on: its clock; where its ledger lies (None: in memory); what its reward waits for; what may
    be changed of the control plane before it runs; who reports; engines that share the trainer's devices."""

    clock: Clock
    ledger: Path | None = None
    wait: Wait = no_wait
    mend: Mend = unchanged
    nothing: Nothing = field(default_factory=Nothing)
    engines: Sequence[VirtualEngine] = ()


def by_text(wait: Wait) -> Callable[..., Any]:
    """A reward by the response's text, after what `wait` waits for by the prompt's label."""

    async def reward(prompt: str, response: str, label: Any) -> float:
        del prompt
        await wait(label)
        return int(response[:8], 16) / 0xFFFFFFFF

    return reward


async def run_plane(config: RunConfig, pace: Pace, clients: list[EngineClient], place: Place) -> Outcome:
    """One run over these engines."""
    clock, nothing = place.clock, place.nothing
    trainer, phases = PacedTrainer(pace, clock, place.engines), Phases(clock)
    versions = NamedVersions(clock, pace, OnUpdate(config.weight_update_policy))
    updater = Updater(versions, clients, nothing, clock, UpdatePolicy(drained=config.drains))
    fleet, room = updater.fleet, float(QUEUED * pace.shape.running * pace.engines)
    routes = Routes(fleet.routable, fleet.standing, fleet.changed, lambda: room)
    rewards = RewardRunner(by_text(place.wait), clock, config.reward_timeout_s)
    generator = Generator(Sampler(routes, Decoder(), clock), rewards)
    count = pace.steps * max(config.rollout_batch_size, config.over_sampling_batch_size or 0) * 2
    prompts = [Prompt(f"p{at}", prompt_ids(at, PROMPT_TOKENS), "", at) for at in range(count)]
    source = PromptSource(prompts, SeedTree(pace.seed), False, None)
    with Ledger(open_database(place.ledger), Claim.of_this_process(clock)) as ledger:
        world = World(
            clock=clock,
            events=nothing,
            source=source,
            generator=generator,
            trainer=trainer,
            weights=WeightUpdates(updater, trainer, UpdatePatience(config.update_weight_timeout_s)),
            evaluations=nothing,
            checkpoints=nothing,
            reporter=nothing,
            phases=phases,
        )
        plane = ControlPlane(config, world, GroupBook(nothing, ledger), pace.steps)
        place.mend(plane)
        base = WeightVersion(0, 0, trainer.root)
        await updater.adopt(base, DEADLINE_S)
        began = clock.now()
        await plane.run(base)
    spans = [(begin - began, end - began) for begin, end in trainer.spans]
    return Outcome(trainer.ended - began, trainer.lengths, nothing.lag, phases.take(), spans, nothing.lags)


def run_virtual(config: RunConfig, pace: Pace, mend: Mend = unchanged, wait: Any = None) -> Outcome:
    """In virtual time. `wait`: called with the clock and a prompt's label by its reward."""
    loop = VirtualLoop(pace.seed, callbacks_max=1 << 40)
    clock = VirtualClock(loop)

    class Timers:
        def later(self, seconds: float, call: Callable[..., object], *args: Any) -> Any:
            return loop.call_later(seconds, call, *args)

    async def waits(label: Any) -> None:
        if wait is not None:
            await wait(clock, label)

    running: list[tuple[float, int]] = []

    def look(engines: list[VirtualEngine]) -> None:
        assert pace.tick_s is not None
        running.append((loop.at, sum(len(engine.running) for engine in engines)))
        loop.call_later(pace.tick_s, look, engines)

    async def main() -> Outcome:
        root = PacedTrainer(pace, clock).root
        timing = (pace.way_s, pace.change_s)
        wire = Wire(
            Faults(random.Random(0), ()),
            Life("paced"),
            Timers().later,
            lambda *_: None,
            lambda *_: None,
            *timing,
        )
        engines = [VirtualEngine(f"e{at}", pace.shape, root, Timers()) for at in range(pace.engines)]
        clients: list[EngineClient] = [VirtualClient(engine, clock, wire) for engine in engines]
        if pace.tick_s is not None:
            look(engines)
        outcome = await run_plane(config, pace, clients, Place(clock, None, waits, mend, engines=engines))
        outcome.running = running
        return outcome

    try:
        return loop.run_until_complete(main())
    finally:
        loop.discard()
