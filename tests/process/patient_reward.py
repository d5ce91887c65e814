"""The reward of examples/trouble.py, which lets the run end only once the killed engine is back: on a loaded
machine that may take longer than the steps after the stall. TROUBLE_RUN names the run's directory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tests.process.run_process import ROOT, of_kind
from turnout.core.imports import load_function

HELD_S = 6.0  # of one call: below its deadline
_trouble = load_function("the example", f"{ROOT}/examples/trouble.py:reward")


def reward(prompt: str, response: str, label: Any, **metadata: Any) -> float:
    score = _trouble(prompt, response, label, **metadata)
    run, end = Path(os.environ["TROUBLE_RUN"]), time.monotonic() + HELD_S
    while time.monotonic() < end and stall_is_over(run) and not is_back(run):
        time.sleep(0.05)
    return score


def stall_is_over(run: Path) -> bool:
    return any(event["reason"].startswith("unscored") for event in of_kind(run, "GroupDropped"))


def is_back(run: Path) -> bool:
    return sum(event["engine"] == "engine-1" for event in of_kind(run, "EngineReady")) > 1
