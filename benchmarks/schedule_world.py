"""A setting of the schedules' benchmark, run by turnout.sim.paced in virtual time or with engine processes: the
production's control plane over engines and a trainer that compute nothing.

Lengths depend on prompt and seed only, so every schedule has the same trajectories to make.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.paced_engine import ENDLESS
from benchmarks.tool_reward import tool_seconds
from turnout.config.run_config import RunConfig
from turnout.core.ports import Clock
from turnout.core.rng import SeedTree
from turnout.placement.real import RealClock
from turnout.serving.address import Address
from turnout.serving.client import EngineClient
from turnout.sim import paced
from turnout.sim.model import EngineShape, length_of
from turnout.sim.paced import DEADLINE_S, Mend, Outcome, Pace, PacedTrainer, Place, unchanged

__all__ = [
    "DEADLINE_S",
    "Mend",
    "Outcome",
    "PacedTrainer",
    "Setting",
    "run_plane",
    "run_real",
    "run_virtual",
    "unchanged",
]


@dataclass(frozen=True)
class Setting:
    """`lanes` requests run at once on each of `engines`, each at `speed` tokens a second, in events of `chunk`;
    responses have `median` tokens, at most 20 times that; a train step of `groups` x `samples` takes `train_s`,
    bringing a version to the store `publish_s`; with `tool` one of benchmarks.tool_reward follows each response.
    `crowd_s`: as EngineShape has it; `train_token_s`: what a response token adds to a train step."""

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
    crowd_s: float = 0.0
    train_token_s: float = 0.0

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
        return EngineShape(self.speed, self.chunk, self.lanes, ENDLESS, self.median, self.crowd_s)

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

    @property
    def pace(self) -> Pace:
        token_s = self.train_token_s
        timing = self.train_s, self.publish_s, self.steps
        return Pace(self.engines, self.shape, *timing, seed=self.seed, train_token_s=token_s)

    def config(self, options: dict[str, Any]) -> RunConfig:
        return RunConfig.model_validate({**self.options, **options})


async def run_plane(
    setting: Setting,
    options: dict[str, Any],
    clients: list[EngineClient],
    place: tuple[Clock, Path | None],
    mend: Mend,
) -> Outcome:
    """One run over these engines. `place`: the clock, and where the ledger lies (None: in memory)."""
    clock, ledger = place

    async def wait(label: Any) -> None:
        if setting.tool:
            await clock.sleep(tool_seconds(label))

    return await paced.run_plane(
        setting.config(options), setting.pace, clients, Place(clock, ledger, wait, mend)
    )


def run_virtual(setting: Setting, options: dict[str, Any], mend: Mend = unchanged) -> Outcome:
    """In virtual time."""

    async def wait(clock: Clock, label: Any) -> None:
        if setting.tool:
            await clock.sleep(tool_seconds(label))

    return paced.run_virtual(setting.config(options), setting.pace, mend, wait)


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
    shape, root = setting.shape, PacedTrainer(setting.pace, clock).root
    names = ("speed", "chunk", "running", "median", "crowd_s")
    numbers = {name.replace("_", "-"): getattr(shape, name) for name in names}
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
