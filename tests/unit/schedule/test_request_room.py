"""How many requests engines are sent, by what is known of them."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from turnout.config.run_config import RunConfig
from turnout.schedule.roster import roster
from turnout.schedule.wiring import request_room
from turnout.serving.roster import EnginePlan

REQUIRED = {
    "hf_checkpoint": "tiny:llama", "prompt_data": "p.jsonl", "custom_rm_path": "m:reward", "rollout_num_engines": 3,
}  # fmt: skip
CUDA = {"engine": "sglang", "sglang_device": "cuda"}


@pytest.mark.parametrize(
    ("options", "room"),
    [
        ({"engine_max_running_requests": 8}, 48.0),
        ({"engine_max_running_requests": 8, "deterministic": True}, inf),
        ({"engine": "sglang", "sglang_device": "cpu", "engine_max_running_requests": 8}, 48.0),
        (CUDA, inf),
        ({**CUDA, "sglang_args": {"max_running_requests": 5}}, 30.0),
    ],
)
def test_twice_what_three_engines_run_where_that_is_known(options: dict[str, Any], room: float) -> None:
    config = RunConfig.model_validate(REQUIRED | options)
    plans = roster(config)
    assert request_room(config, lambda: plans)() == room


def test_engines_that_join_have_room_each_for_its_size() -> None:
    config = RunConfig.model_validate(REQUIRED | {"engine_max_running_requests": 8})
    plans = (EnginePlan("e0"),)
    room = request_room(config, lambda: plans)
    assert room() == 16.0
    plans = (*plans, EnginePlan("e1", running=3))
    assert room() == 22.0
