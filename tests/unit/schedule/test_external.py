"""Engines of somebody else are told only when they answer: what a run can't ask of an SGLang is refused then."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_engine import Answer, ScriptedEngine
from turnout.config.run_config import RunConfig
from turnout.core.errors import ConfigError
from turnout.placement.real import RealClock
from turnout.schedule.external import external_engines
from turnout.serving.external import external_plan

OURS = {"engine": "turnout", "version": "turnout-0.1", "engine_id": "e", "pid": 7, "started_at": 1.5,
        "dtype": "bfloat16", "device": "cpu", "tp_size": 1, "model_path": "/m", "vocab_size": 256}  # fmt: skip
STOCK = {"version": "0.5.23", "model_path": "/m", "dtype": "bfloat16", "device": "cpu", "tp_size": 1}


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"router": "smg", "schedule": "async", "max_engine_lag": 1}, "--max-engine-lag = 1"),
        ({"schedule": "async", "on_weight_update": "continue"}, "--on-weight-update = continue"),
        ({"deterministic": True, "engine_threads": 1, "trainer_threads": 1}, "--deterministic"),
    ],
)
def test_an_sglang_that_the_options_exclude(tmp_path: Path, options: dict[str, Any], flag: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 256}))

    async def main() -> None:
        async with ScriptedEngine() as engine:
            engine.script("/server_info", Answer(body=STOCK))
            engine.script("/model_info", Answer(body={}))
            named = {"rollout_external_engine_addrs": [engine.address.url]}
            required = {"hf_checkpoint": "m", "prompt_data": "p", "num_rollout": 1}
            config = RunConfig.model_validate(required | named | options)
            engines = external_engines(config, tmp_path, RealClock(), ("run", 0))
            with pytest.raises(ConfigError) as caught:
                await engines.connect(external_plan(engine.address), 20.0)
        (fault,) = caught.value.faults
        assert fault.line().startswith(f"{flag}: {engine.address.place} is sglang-0.5.23: ")

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(("given", "seconds"), [({}, 250.0), ({"update_weight_timeout_s": 9000.0}, 3600.0)])
def test_the_first_lease_lasts_until_the_first_version_is_there(
    tmp_path: Path, given: dict[str, float], seconds: float
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 256}))

    async def main() -> None:
        async with ScriptedEngine() as engine:
            engine.script("/server_info", Answer(body=OURS))
            engine.script("/model_info", Answer(body={"vocab_size": 256}))
            times = {"engine_start_timeout_s": 100.0, "update_weight_timeout_s": 150.0}
            required = {"hf_checkpoint": "m", "prompt_data": "p", "num_rollout": 1}
            named = {"rollout_external_engine_addrs": [engine.address.url]}
            config = RunConfig.model_validate(required | named | times | given)
            engines = external_engines(config, tmp_path, RealClock(), ("run", 0))
            made = await engines.connect(external_plan(engine.address), 20.0)
            assert [row["seconds"] for row in engine.sent("/lease")] == [seconds]
            await made.stop()

    asyncio.run(asyncio.wait_for(main(), 60))
