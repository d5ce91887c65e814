"""What the controller costs: CPU time per trajectory, HTTP apart, by what is in flight and by engines.

    python -m benchmarks.control --json FILE [--quick]

The production's control plane (benchmarks.schedule_world) on the real event loop and clock, with engines in this
process that answer with ready-made tokens: 64 of them, in two events, after a time that keeps the loop busy. What
these engines and the reading of their answers cost by themselves is measured in the same way, without a control
plane, and taken off. Counted: admission, seeds, requests' making, streams' taking in, journal, reward, ledger (a
file), events, batches, commits. Not counted: HTTP and its JSON, the trainer, what a reward computes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.schedule_world import DEADLINE_S, PacedTrainer, Setting, run_plane, unchanged
from turnout.core.ports import Clock
from turnout.core.types import Finish
from turnout.placement.processes import settle_collector
from turnout.placement.real import RealClock
from turnout.protocol.sglang import GenerateReply, GenerateRequest, SamplingParams
from turnout.protocol.stream import PartialReply
from turnout.serving.address import Address
from turnout.serving.client import Attestation, EngineClient

TOKENS = (32, 32)
SECONDS_EACH = 3e-4  # of an answer, by how many are in flight
SECONDS_LEAST = 0.02
SAMPLES = 8
IN_FLIGHT = (100, 1_000, 10_000, 100_000)
TARGET_US = 100.0
IDS = tuple(range(100, 100 + sum(TOKENS)))
LOGPROBS = (-0.5,) * sum(TOKENS)


class ReadyEngine(EngineClient):
    """Has every answer ready. Control calls are taken at once."""

    def __init__(self, name: str, clock: Clock, root: str, in_flight: int) -> None:
        super().__init__(name, Address("127.0.0.1", 1), clock)
        self.label, self.root = "default", root
        self.prepared = ("", "")
        self.pause_s = max(SECONDS_LEAST, SECONDS_EACH * in_flight) / len(TOKENS)

    async def generate_stream(
        self, request: GenerateRequest, deadline_s: float
    ) -> AsyncGenerator[PartialReply | GenerateReply, None]:
        del request, deadline_s
        at = 0
        for count in TOKENS:
            await self._clock.sleep(self.pause_s)
            end = at + count
            yield PartialReply(
                IDS[at:end], LOGPROBS[at:end], ((count, self.label),), (0,) * count, self.engine_id
            )
            at = end
        yield GenerateReply("", IDS, LOGPROBS, Finish.STOP, "", ((at, self.label),), 4, 0)

    async def attest(self, deadline_s: float) -> Attestation:
        del deadline_s
        return Attestation(self.label, self.root, "memory")

    async def control(self, path: str, body: dict[str, Any], deadline_s: float) -> Any:
        del deadline_s
        if path == "/prepare_weights":
            self.prepared = body["weight_version"], body["model_path"]
            return {"success": True, "prepared_id": "set"}
        if path == "/activate_weights":
            self.label, self.root = self.prepared
        return {"success": True}

    async def set_version_label(self, label: str) -> None:
        self.label = label

    async def load(self) -> int:
        return 0


@dataclass(frozen=True)
class Cost:
    """One measurement; CPU microseconds. `bare_us`: engines and clock alone, already taken off `us`."""

    in_flight: int
    engines: int
    trajectories: int
    us: float
    bare_us: float

    def line(self) -> str:
        return (
            f"{self.in_flight:>7} in flight, {self.engines:>4} engines: {self.us:6.1f} us a trajectory"
            f" ({self.bare_us:.1f} us for the engines taken off), {self.trajectories} trajectories"
        )


def cpu_seconds(work: Callable[[Clock], Any]) -> tuple[float, Any]:
    """CPU seconds of `work`, and its result. The collector runs before it too, so that it has nothing of others."""
    gc.collect()
    began = time.process_time()
    result = asyncio.run(work(RealClock()))
    return time.process_time() - began, result


def plane_seconds(in_flight: int, engines: int, least: int) -> tuple[float, int]:
    """CPU seconds of a whole run, and its trajectories. A third of what is in flight makes a step."""
    groups = max(1, in_flight // SAMPLES // 3)
    steps = max(4, -(-least // (groups * SAMPLES)))
    setting = Setting(engines, in_flight, 1.0, 32, 40.0, groups, SAMPLES, steps, train_s=0.0, publish_s=0.0)
    options = {"schedule": "async", "max_staleness": 2, "rollout_window": 1}

    async def work(clock: Clock) -> int:
        root = PacedTrainer(setting.pace, clock).root
        clients: list[EngineClient] = [ReadyEngine(f"e{at}", clock, root, in_flight) for at in range(engines)]
        with tempfile.TemporaryDirectory() as folder:
            place = clock, Path(folder) / "ledger.sqlite"
            outcome = await run_plane(setting, options, clients, place, unchanged)
        return len(outcome.lengths)

    return cpu_seconds(work)


def bare_seconds(in_flight: int, trajectories: int) -> float:
    """CPU seconds of the engines and the clock: as many streams, as many at once, read and thrown away."""

    async def work(clock: Clock) -> None:
        engine = ReadyEngine("e0", clock, "0" * 32, in_flight)
        request = GenerateRequest("r", (1,), SamplingParams())
        left = iter(range(trajectories))

        async def lane() -> None:
            for _ in left:
                async for _item in engine.generate_stream(request, DEADLINE_S):
                    pass

        await asyncio.gather(*(lane() for _ in range(in_flight)))

    return cpu_seconds(work)[0]


def cost(in_flight: int, engines: int, least: int) -> Cost:
    seconds, trajectories = plane_seconds(in_flight, engines, least)
    bare = bare_seconds(in_flight, trajectories)
    return Cost(
        in_flight,
        engines,
        trajectories,
        (seconds - bare) / trajectories * 1e6,
        bare / trajectories * 1e6,
    )


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.control", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="at most 10,000 in flight, fewer trajectories")
    given = parser.parse_args(words)
    settle_collector()  # as the process of a run does
    least = 3_000 if given.quick else 20_000
    cases = [(count, 4) for count in IN_FLIGHT if not given.quick or count <= 10_000] + [(10_000, 1_000)]
    found: list[Cost] = []
    for in_flight, engines in cases:
        found.append(cost(in_flight, engines, least))
        print(found[-1].line(), flush=True)
    if given.json is not None:
        row = {
            "machine": describe(),
            "target_us": TARGET_US,
            "tokens": sum(TOKENS),
            "samples": SAMPLES,
            "costs": [vars(one) for one in found],
        }
        given.json.write_text(json.dumps(row, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
