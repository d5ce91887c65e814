"""/metrics over HTTP: the text, its content type, and a port that is taken."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from tests.unit.observe.prometheus import parse
from turnout.core.errors import ConfigError
from turnout.core.events import StepTrained
from turnout.observe.run_metrics import RunMetrics
from turnout.schedule.metrics_server import metrics_served


def test_it_serves_what_is_counted_now_until_the_block_ends() -> None:
    async def main() -> None:
        metrics = RunMetrics("a run")
        async with aiohttp.ClientSession() as session:
            async with metrics_served(0, metrics.text) as url:
                assert url.startswith("http://127.0.0.1:") and url.endswith("/metrics")
                for steps in range(3):
                    async with session.get(url) as answer:
                        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                        families = parse(await answer.text())
                    assert families["turnout_train_steps_total"].samples[0].value == steps
                    metrics.take(StepTrained(steps, 1, 10, 1))
                port = int(url.split(":")[2].split("/")[0])
                with pytest.raises(ConfigError, match=f"--metrics-port = {port}: can't be listened on"):
                    async with metrics_served(port, metrics.text):
                        pass
            with pytest.raises(aiohttp.ClientConnectionError):
                await session.get(url)

    asyncio.run(main())
