"""How long and how large a run may become, and how it stops before its end: in good order, or cut off.

Owns the wish to stop. Promises: with --max-wall-time, and with --run-dir-max-gb as soon as the directory is found
to be larger, the run is told to stop as a signal tells it; --grace-s later it is cut off where it is. Beside that
the ledger's lease is kept.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path

from turnout.config.run_config import RunConfig
from turnout.core.errors import DeadlineExceeded, RunCut
from turnout.core.ports import Clock
from turnout.rollout.ledger import Ledger
from turnout.rollout.ledger_owner import LEASE_S

PAUSED = "paused"
SIZE_S = 15.0
GB = 1e9


class RunLimits:
    """Of one incarnation. `told` gets the status and the reason of each wish to stop."""

    def __init__(self, config: RunConfig, root: Path, clock: Clock, told: Callable[[str, str], None]) -> None:
        self._config, self._root, self._clock, self._told = config, root, clock, told
        self._event = asyncio.Event()
        self.spent_s = 0.0  # by incarnations of this process before this one
        self._reason = ""

    def stop(self, status: str, reason: str) -> None:
        """Ends the run in good order: the step under way is done, a checkpoint is written."""
        self._told(status, reason)
        self._reason = reason
        self._event.set()

    @property
    def stopping(self) -> bool:
        return self._event.is_set()

    async def stopped(self) -> None:
        """Waits until the run should stop."""
        await self._event.wait()

    async def within(self, work: Coroutine[object, object, None], ledger: Ledger | None) -> None:
        """Runs `work` within the limits; raises RunCut where it was cut off."""
        main = asyncio.ensure_future(work)
        grace = asyncio.ensure_future(self._grace(main))
        beside = [grace, asyncio.ensure_future(self._size()), asyncio.ensure_future(self._renew(ledger))]
        try:
            await main
        except asyncio.CancelledError:
            if grace.done():
                raise RunCut(f"{self._reason}: cut off after {self._config.grace_s:g} s") from None
            raise
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def _grace(self, main: asyncio.Future[None]) -> None:
        limit = self._config.max_wall_time
        try:
            if limit is not None:
                await self._clock.within(max(0.0, limit - self.spent_s), "the run to end", self._event.wait())
            await self._event.wait()
        except DeadlineExceeded:
            self.stop(PAUSED, f"--max-wall-time {limit:g}")
        await self._clock.sleep(self._config.grace_s)
        main.cancel()

    async def _size(self) -> None:
        limit = self._config.run_dir_max_gb
        while limit is not None and not self.stopping:
            found = folder_bytes(self._root) / GB
            if found > limit:
                self.stop(PAUSED, f"--run-dir-max-gb {limit:g}: {self._root} holds {found:.3g} GB")
            await self._clock.sleep(SIZE_S)

    async def _renew(self, ledger: Ledger | None) -> None:
        while ledger is not None:
            await self._clock.sleep(LEASE_S / 8)
            ledger.renew()


def folder_bytes(folder: Path) -> int:
    """Bytes on disk of all files below a folder; links are not followed, what goes meanwhile doesn't count."""
    total, seen = 0, set[int]()
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                found = (Path(place) / name).lstat()
            except FileNotFoundError:
                continue
            if found.st_ino not in seen:
                seen.add(found.st_ino)
                total += found.st_blocks * 512
    return total
