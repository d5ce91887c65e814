"""The lane with a real SGLang on a CPU: `make test-sglang`. Nothing here is collected otherwise.

It makes its environment (3.3 GB) on first use. A server takes 20 s to start alone, minutes beside other work:
deadlines have room for that.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

collect_ignore_glob = [] if os.environ.get("TURNOUT_TEST_SGLANG") == "1" else ["test_*.py"]

T = TypeVar("T")
START_DEADLINE_S = 600.0
CALL_DEADLINE_S = 900.0
KEY = "sesame"


class Server:
    """A running server and a loop of its own, on which calls to it run. `folder` takes its log."""

    def __init__(self, python: Path, model: Path, folder: Path, **changes: Any) -> None:
        from turnout.placement.real import RealClock
        from turnout.serving.sglang_launcher import SglangLaunch, launch_sglang

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        arguments = {"max-total-tokens": 131072, "max-running-requests": 32, "enable-metrics": True}
        spec = SglangLaunch(
            "engine-0", python, model, "float32", folder, START_DEADLINE_S, "cpu", 1, arguments
        )
        self.engine = self.do(launch_sglang(replace(spec, **changes), RealClock()))
        self.client = self.engine.client

    @property
    def key(self) -> str:
        """Of control calls; generation needs none."""
        return KEY

    @property
    def url(self) -> str:
        return self.client.address.url

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_DEADLINE_S)

    def stop(self) -> None:
        self.do(self.engine.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    from tests.sglang.environment import interpreter

    return interpreter()


@pytest.fixture(scope="session")
def model() -> Path:
    """The tiny model's checkpoint folder."""
    from turnout.train.model_zoo import resolve_checkpoint

    return resolve_checkpoint("tiny:llama")


@pytest.fixture(scope="session")
def server(sglang_python: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests of a session; a test leaves it generating, with whatever weights."""
    made = Server(sglang_python, model, tmp_path_factory.mktemp("server"), key=KEY)
    yield made
    made.stop()
