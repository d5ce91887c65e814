"""`turnout weights follow` as a process that tells each phase it enters, on a host whose files are slow.

python -m tests.follower_child SEED [options of turnout weights follow]
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from typing import Any

from turnout.cli.main import main
from turnout.transfer.followed_engine import HttpEngine
from turnout.transfer.follower import Phases
from turnout.weights.depot import FolderDepot
from turnout.weights.host_files import HostFiles

STEP_S, PROOF_S = 0.003, 0.4
STEPS = ("create", "append", "sync", "sync_path", "rename", "remove", "scatter", "fill", "flush")


def tell_phases() -> None:
    begin = Phases.begin

    def told(self: Phases, phase: str) -> None:
        if phase:
            print(f"PHASE {phase}", flush=True)
        begin(self, phase)

    Phases.begin = told  # type: ignore[method-assign]


def slow_down(kind: type, name: str, rng: random.Random) -> None:
    call = getattr(kind, name)

    def slow(*arguments: Any) -> Any:
        time.sleep(rng.random() * STEP_S)
        return call(*arguments)

    setattr(kind, name, slow)


def slow_proof(rng: random.Random) -> None:
    prove = HttpEngine.prove

    async def slow(self: HttpEngine, *arguments: Any) -> str:
        await asyncio.sleep(rng.random() * PROOF_S)
        return await prove(self, *arguments)

    HttpEngine.prove = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    seed = int(sys.argv[1])
    tell_phases()
    for step in STEPS:
        slow_down(HostFiles, step, random.Random(seed))
    slow_proof(random.Random(seed))
    slow_down(FolderDepot, "fetch_file", random.Random(seed))
    sys.exit(main(["weights", "follow", *sys.argv[2:]]))
