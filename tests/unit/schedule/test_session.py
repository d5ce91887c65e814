"""Engines that an incarnation leaves for the next one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from turnout.cli import train
from turnout.core.errors import LedgerError, TrainerLost
from turnout.schedule.session import Session


class Process:
    stops = 0

    async def stop(self, grace_s: float) -> None:
        self.stops += 1


class Lost(Session):
    """One that loses its trainer, and has left an engine by then; with another end it ends as that."""

    def __init__(self, engine: Process, other: Exception | None, stopping: bool) -> None:
        self._run: Any = SimpleNamespace(left={})
        self._left: Any = {"engine-0": engine}
        self.limits: Any = SimpleNamespace(stopping=stopping)
        self.other = other

    async def run(self, inputs: Any, panel: Any) -> Any:
        raise self.other or TrainerLost("killed")


@pytest.mark.parametrize(
    ("other", "stopping"), [(None, True), (LedgerError("no space"), False), (asyncio.CancelledError(), False)]
)
def test_no_engine_is_left_where_no_incarnation_follows(
    tmp_path: Path, other: Exception | None, stopping: bool
) -> None:
    engine = Process()
    config: Any = SimpleNamespace(panel=False, grace_s=1.0)
    paths: Any = SimpleNamespace(root=tmp_path)
    try:
        asyncio.run(train._run([Lost(engine, other, stopping)], None, config, paths))
    except (TrainerLost, LedgerError, asyncio.CancelledError) as end:
        assert isinstance(end, type(other or TrainerLost("")))
    assert engine.stops == 1
