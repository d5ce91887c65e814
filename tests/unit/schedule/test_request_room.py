"""How many requests engines are sent, by what is known of them."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from turnout.config.run_config import RunConfig
from turnout.schedule.wiring import request_room

REQUIRED = {"hf_checkpoint": "tiny:llama", "prompt_data": "p.jsonl", "custom_rm_path": "m:reward"}
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
    assert request_room(RunConfig.model_validate(REQUIRED | options), lambda: 3)() == room


def test_engines_that_join_have_room() -> None:
    engines = ["e0"]
    room = request_room(
        RunConfig.model_validate(REQUIRED | {"engine_max_running_requests": 8}), lambda: len(engines)
    )
    engines.append("e1")
    assert room() == 32.0
