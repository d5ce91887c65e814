"""Is `turnout plan` right: predicted against measured step time and lag, at settings that were not calibrated with.

    python -m benchmarks.plan --json FILE [--quick] [--only paced real]

paced: the production's control plane with engine processes over HTTP that compute nothing but take their time (a
decode step takes the longer the more requests run), and a trainer that sleeps by its tokens: times that a shared
machine does not disturb. real: `turnout train` with this engine and trainer on a tiny model. Each part makes two
runs of --schedule sync, calibrates with their run directories as `turnout plan --calibrate` does, and predicts
sync, pipelined and async at another batch, at twice the length and with twice the engines, which are then run. The
length distribution at twice the length is the calibrated one, scaled. Steps at the beginning and the end of a run,
which fill and empty it, count on neither side. `max_step_time_error` is |predicted / measured - 1|, `max_lag_error`
is by the largest lag of a trained group.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.machine import cpus, describe
from benchmarks.schedule_world import Setting, engine_processes
from turnout.config.load import dump, load
from turnout.config.run_config import RunConfig
from turnout.core.events import GroupTrained, from_json
from turnout.observe.metrics import SECONDS, MetricsLog, read_metrics
from turnout.placement.real import RealClock
from turnout.plan.cluster import Cluster, Device, Found, this_machine
from turnout.plan.configured import own_prediction
from turnout.plan.make import Asked, known_of, recorded, work_of
from turnout.plan.virtual import steady
from turnout.schedule.control import ControlPlane
from turnout.schedule.reporter import step_row
from turnout.sim.paced import Nothing, Place, run_plane

SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {"schedule": "sync"},
    "pipelined": {"schedule": "pipelined"},
    "async": {"schedule": "async", "max_staleness": 2},
}
STEP_TARGET, LAG_TARGET = 0.25, 1
STEPS = 40  # that are simulated: a few long responses weigh less then
PROMPTS = "examples/data/sums_train.jsonl"
# A decode step takes 8 ms and 0.4 ms more for each request, a train step of the calibrated batch about 1.7 s. Few
# events a second, so that what the controller and these engines compute does not count on a busy machine.
PACED = Setting(2, 8, 120.0, 8, 40.0, groups=12, samples=4, steps=12, train_s=0.2, publish_s=0.05)
PACED = replace(PACED, crowd_s=4e-4, train_token_s=5.5e-4)
PACED_CALIBRATED = (PACED, replace(PACED, groups=4))
PACED_CASES = {
    "another batch": replace(PACED, groups=10, samples=6),
    "twice the length": replace(PACED, median=80.0),
    "twice the engines": replace(PACED, engines=4),
}
REAL: dict[str, Any] = {
    "hf_checkpoint": "tiny:llama",
    "prompt_data": PROMPTS,
    "input_key": "prompt",
    "label_key": "label",
    "apply_chat_template": True,
    "custom_rm_path": "examples/tiny_reward.py:share_of_digits",
    "rollout_batch_size": 8,
    "n_samples_per_prompt": 8,
    "rollout_max_response_len": 128,
    "rollout_num_engines": 1,
    "engine_threads": 1,
    "trainer_threads": 1,
    "lr": 1e-5,
    "num_rollout": 14,
    "plots": False,
    "tensorboard": False,
    "before_after_samples": 0,
    "panel": "off",
}
REAL_CALIBRATED: tuple[dict[str, Any], ...] = ({}, {"rollout_batch_size": 3})
REAL_CASES: dict[str, dict[str, Any]] = {
    "another batch": {"rollout_batch_size": 14, "n_samples_per_prompt": 6},
    "twice the length": {"rollout_max_response_len": 256},
    "twice the engines": {"rollout_num_engines": 2},
}


@dataclass(frozen=True)
class Told:
    """Seconds of a step and the largest lag, as measured."""

    step_s: float
    lag: int


class Recording(Nothing):
    """Writes what `turnout plan` reads of a run."""

    def __init__(self, folder: Path, clock: RealClock) -> None:
        super().__init__()
        self._metrics, self._clock = MetricsLog(folder / "metrics.jsonl"), clock
        self._began: float | None = None
        self._plane: ControlPlane | None = None

    def mend(self, plane: ControlPlane) -> None:
        self._plane, self._began = plane, self._clock.now()

    def step(self, batch: Any, metrics: Any, version: Any) -> None:
        del metrics
        assert self._plane is not None and self._began is not None
        now = self._clock.now()
        seconds = self._plane._parts.phases.take() | {"step": now - self._began}
        self._began = now
        row = step_row(batch, version) | {SECONDS + name: value for name, value in seconds.items()}
        self._metrics.write(batch.step + 1, row)


def told(folder: Path, lags: list[tuple[int, int]]) -> Told:
    """`lags`: (step, lag) of groups, steps from 0."""
    seconds = [row[SECONDS + "step"] or 0.0 for _, row in read_metrics(folder / "metrics.jsonl")]
    kept = steady(len(seconds), load(folder / "config.json").lead)
    return Told(fmean(seconds[kept.start : kept.stop]), max(lag for step, lag in lags if step in kept))


# paced


def paced_config(setting: Setting, options: dict[str, Any]) -> RunConfig:
    lanes = {"engine_max_running_requests": setting.lanes, "prompt_data": PROMPTS}
    return setting.config({**options, **lanes, "custom_rm_path": None, "rm_type": "last_number"})


def run_paced(setting: Setting, options: dict[str, Any], folder: Path) -> Told:
    folder.mkdir()
    config = paced_config(setting, options)
    (folder / "config.json").write_text(dump(config))

    async def main() -> list[tuple[int, int]]:
        clock = RealClock()
        recording = Recording(folder, clock)
        async with engine_processes(setting, clock) as clients:
            place = Place(clock, folder / "ledger.sqlite", mend=recording.mend, nothing=recording)
            return (await run_plane(config, setting.pace, clients, place)).lags

    return told(folder, asyncio.run(main()))


def paced(folder: Path, quick: bool) -> list[dict[str, Any]]:
    """Devices that no model's memory fills, and that nobody else uses."""
    device = Device(memory_gb=1e4, tflops=1e3, memory_gb_per_s=1e4)
    found = Found(Cluster(name="paced", devices_per_machine=16, device=device), "benchmark", False)
    runs = [folder / f"calibrated-{at}" for at in range(len(PACED_CALIBRATED))]
    for setting, run in zip(PACED_CALIBRATED, runs):
        run_paced(setting, SCHEDULES["sync"], run)
    rows: list[dict[str, Any]] = []
    for name, setting in PACED_CASES.items():
        case = replace(setting, steps=6) if quick else setting
        scale = case.median / PACED.median
        for schedule, options in SCHEDULES.items():
            config = paced_config(case, options)
            found_s = run_paced(case, options, folder / f"{name}-{schedule}")
            rows.append(row_of(("paced", name, schedule), config, (found, runs, scale), found_s))
    return rows


# real


def run_real(options: dict[str, Any], folder: Path) -> Told:
    file = folder.with_suffix(".json")
    file.write_text(json.dumps(options))
    command = [sys.executable, "-m", "turnout.cli.main", "train", str(file), "--run-dir", str(folder)]
    subprocess.run(command, check=True, timeout=900, stdout=subprocess.DEVNULL)
    events = [from_json(json.loads(line)) for line in (folder / "events.jsonl").read_text().splitlines()]
    return told(folder, [(event.step, event.lag) for event in events if isinstance(event, GroupTrained)])


def real(folder: Path, quick: bool) -> list[dict[str, Any]]:
    runs = [folder / f"calibrated-{at}" for at in range(len(REAL_CALIBRATED))]
    for changes, run in zip(REAL_CALIBRATED, runs):
        run_real(REAL | SCHEDULES["sync"] | changes, run)
    found, rows = this_machine(), list[dict[str, Any]]()
    for name, changes in REAL_CASES.items():
        for schedule, options in SCHEDULES.items():
            given = REAL | options | changes | ({"num_rollout": 8} if quick else {})
            run = folder / f"{name}-{schedule}".replace(" ", "-")
            found_s = run_real(given, run)
            scale = given["rollout_max_response_len"] / REAL["rollout_max_response_len"]
            config = load(run / "config.json")
            rows.append(row_of(("real", name, schedule), config, (found, runs, scale), found_s))
    return rows


Knowledge = tuple[Found, list[Path], float]


def row_of(names: tuple[str, str, str], config: RunConfig, known: Knowledge, found_s: Told) -> dict[str, Any]:
    """One case: what was predicted from the calibrated runs alone, and what came."""
    found, folders, scale = known
    runs = recorded(folders, found)
    work, _ = work_of(config, runs, Asked(Path(), scale=scale))
    predicted = own_prediction(config, work, found, known_of(work, found, runs), STEPS)
    assert predicted is not None, "every case fits"
    row = {
        **dict(zip(("part", "setting", "schedule"), names)),
        "predicted_s": round(predicted.step_s, 4),
        "measured_s": round(found_s.step_s, 4),
        "error": round(predicted.step_s / found_s.step_s - 1, 4),
        "predicted_lag": predicted.lag,
        "measured_lag": found_s.lag,
    }
    print(" ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


PARTS: dict[str, Callable[[Path, bool], list[dict[str, Any]]]] = {"paced": paced, "real": real}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.plan", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--only", nargs="*", choices=[*PARTS], default=[*PARTS])
    given = parser.parse_args(words)
    found: dict[str, Any] = {"machine": describe(), "cpus": cpus(), "quick": given.quick, "cases": []}
    for name in given.only:
        with tempfile.TemporaryDirectory() as folder:
            found["cases"] += PARTS[name](Path(folder), given.quick)
    by_part = {name: [row for row in found["cases"] if row["part"] == name] for name in given.only}
    found["max_step_time_error"] = max(abs(row["error"]) for row in found["cases"])
    found["max_lag_error"] = max(abs(row["predicted_lag"] - row["measured_lag"]) for row in found["cases"])
    found["by_part"] = {name: max(abs(row["error"]) for row in rows) for name, rows in by_part.items()}
    met = found["max_step_time_error"] <= STEP_TARGET and found["max_lag_error"] <= LAG_TARGET
    found["targets"] = {"step_time": STEP_TARGET, "lag": LAG_TARGET, "met": met}
    print(
        f"step time within {found['max_step_time_error']:.0%} ({found['by_part']}), lag within "
        f"{found['max_lag_error']}: {'met' if met else 'NOT MET'}"
    )
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
