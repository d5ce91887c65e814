"""The embedded engine as a target: started on a model, with others started beside it where a check asks.

Promises: every engine that was started is stopped when the block ends, however it ends.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from turnout.bench.versions import ModelVersion
from turnout.core.ports import Clock
from turnout.serving.exchange import Exchange
from turnout.serving.launcher import EngineLaunch, launch

START_DEADLINE_S = 180.0
# Small enough that eight requests fill the slots, and that a prompt of a few hundred tokens takes several steps.
FLAGS = ("--max-total-tokens", "32768", "--max-running-requests", "8", "--max-step-tokens", "64")


@dataclass(frozen=True)
class Nursery:
    """Starts engines in one folder. `flags` are further flags of `python -m turnout.engine`."""

    work: Path
    flags: tuple[str, ...]
    token: str | None
    clock: Clock
    stack: AsyncExitStack

    async def start(self, name: str, version: ModelVersion, *more: str) -> Exchange:
        """A new engine on this version, serving it under the version's label."""
        arguments = (
            *("--model-path", str(version.folder), "--weight-version", version.label, "--engine-id", name),
            *("--allowed-root", str(self.work), "--allowed-root", str(version.folder)),
            *(*FLAGS, *self.flags, *more),
        )
        spec = EngineLaunch(name, arguments, 1, self.work / "engines", START_DEADLINE_S, self.token)
        spec.folder.mkdir(parents=True, exist_ok=True)
        engine = await launch(spec, self.clock)
        self.stack.push_async_callback(engine.stop)
        wire = Exchange(engine.client.address, self.token)
        self.stack.push_async_callback(wire.close)
        return wire


@asynccontextmanager
async def nursery(
    work: Path, flags: tuple[str, ...], token: str | None, clock: Clock
) -> AsyncIterator[Nursery]:
    """`token` becomes the admin token of every engine started here."""
    async with AsyncExitStack() as stack:
        yield Nursery(work, flags, token, clock, stack)
