"""`turnout plan` with a run that was really made: what it measured is in the plan, and it needs no torch."""

from __future__ import annotations

import json
from pathlib import Path

from .run_process import ROOT, TINY, ended, start, train

NO_TORCH = str(ROOT / "tests" / "process" / "no_torch")
OPTIONS = ("--num-rollout", "6", "--rollout-batch-size", "2", "--n-samples-per-prompt", "4")


def test_a_plan_from_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    status, out, err = train(run, *OPTIONS, "--eval-num-prompts", "1", "--before-after-samples", "0")
    assert status == 0, out + err
    words = ("plan", str(TINY), "--calibrate", str(run), "--json", *OPTIONS, "--engine-threads", "1")
    status, out, err = ended(start(*words, PYTHONPATH=NO_TORCH))
    assert status == 0, err
    plan = json.loads(out)
    assert plan["lengths"] == plan["lengths"] | {"from": "measured: run", "max": 16}
    figures = plan["recommended"]["figures"]
    assert {figures[name]["source"] for name in ("base_s", "request_s", "train_token_s")} == {"measured"}
    assert plan["as_configured"]["simulated"] and plan["as_configured"]["lag"] == 0
    assert 0 < plan["as_configured"]["step_s"] < 60
    assert plan["flags_refused"] == [] or plan["usable"]["flags"]
