"""A run stops in good order at its limits, and is cut off where it doesn't."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.unit.rollout.parts import memory_ledger
from turnout.core.errors import RunStopped
from turnout.placement.real import RealClock
from turnout.schedule.limits import RunLimits, folder_bytes


class Sleeper(RealClock):
    """Sleeps end at once; what was slept is kept."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)


def limits(root: Path, told: list[tuple[str, str]], clock: RealClock, **options: Any) -> RunLimits:
    given = {"max_wall_time": None, "run_dir_max_gb": None, "grace_s": 7.0, **options}
    return RunLimits(cast("Any", SimpleNamespace(**given)), root, clock, lambda *why: told.append(why))


async def ended(one: RunLimits) -> None:
    """Work that takes one step more once it should stop."""
    await one.stopped()


async def stubborn() -> None:
    await asyncio.Event().wait()


def test_a_run_directory_that_grows_over_its_limit_stops_the_run(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []

    async def run() -> None:
        one = limits(tmp_path, told, Sleeper(), run_dir_max_gb=0.001)

        async def work() -> None:
            for _ in range(20):  # many looks while it is small
                await asyncio.sleep(0)
            assert not one.stopping
            (tmp_path / "deep").mkdir()
            (tmp_path / "deep" / "weights").write_bytes(os.urandom(2_000_000))
            await ended(one)

        await one.within(work(), memory_ledger())

    asyncio.run(asyncio.wait_for(run(), 60))
    assert told == [("paused", f"--run-dir-max-gb 0.001: {tmp_path} holds 0.002 GB")]


def test_a_run_without_limits_ends_by_itself(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []
    (tmp_path / "file").write_bytes(bytes(1_000_000))

    async def work() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    asyncio.run(limits(tmp_path, told, Sleeper(), run_dir_max_gb=1.0).within(work(), memory_ledger()))
    assert told == []


def test_the_time_limit_stops_the_run_and_the_grace_period_cuts_it_off(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []
    clock = Sleeper()
    with pytest.raises(RunStopped, match=r"--max-wall-time 0\.01: cut off after 7 s"):
        asyncio.run(limits(tmp_path, told, clock, max_wall_time=0.01).within(stubborn(), memory_ledger()))
    assert told == [("paused", "--max-wall-time 0.01")] and 7.0 in clock.slept


def test_the_size_of_a_folder_counts_a_file_once_and_no_link(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(os.urandom(100_000))
    alone = folder_bytes(tmp_path)
    assert 100_000 <= alone < 150_000
    os.link(tmp_path / "a", tmp_path / "b")
    (tmp_path / "c").symlink_to("/usr")
    assert alone <= folder_bytes(tmp_path) < alone + 8192
