"""The three schedules on the same long-tailed work: how long each takes, and how long the best one could.

    python -m benchmarks.schedule --json FILE [--quick] [--only virtual real engines]

virtual: in virtual time (benchmarks.schedule_world). real: the same with engine processes over HTTP that compute
nothing, on real time. engines: `turnout train` with this engine and trainer on a tiny model, and a tool that takes
0.1 to 5 seconds. Lengths are lognormal, the longest 20 times the median. `share` is the best possible makespan
(benchmarks.schedule_bound; no schedule and no bound on the lag could be faster) over the measured one; `gain` is
sync's seconds over the schedule's. The lengths of trained samples are compared with as many of other prompts; a
buffer that trains whatever is complete first is measured too, to see that the test finds its bias. `targets` in the
JSON, and the table at the end, say what was asked for and what came out. All of it takes about seven minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from bisect import insort
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.schedule_bound import Shop, best_makespan, same_distribution
from benchmarks.schedule_world import Mend, Outcome, Setting, run_real, run_virtual, unchanged
from benchmarks.tool_reward import tool_seconds
from turnout.rollout.buffer import WindowBuffer
from turnout.schedule.control import ControlPlane
from turnout.sim.model import length_of

LAG = 3
SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {"schedule": "sync"},
    "pipelined": {"schedule": "pipelined"},
    "async": {"schedule": "async", "max_staleness": LAG},
}
# What else may be asked of both ends: sync that drops what is slowest of a step (short answers win), or cuts it and
# goes on with it in the next one (its tokens are older then); async with less lead.
VARIANTS: dict[str, dict[str, Any]] = {
    "sync, 80 of 64": {"schedule": "sync", "over_sampling_batch_size": 80},
    "sync, cut at 80": {
        "schedule": "sync",
        "over_sampling_batch_size": 80,
        "partial_rollout": True,
        "max_staleness": LAG,
    },
    "async, bound 1": {"schedule": "async", "max_staleness": 1},
    "async, bound 2": {"schedule": "async", "max_staleness": 2},
}
FIRST_COME = "first come"
# Lanes are 32; a step's rollouts keep them busy for about 9.4 s, its longest response takes up to 16.
VIRTUAL = Setting(2, 16, 50.0, 8, 40.0, groups=64, samples=4, steps=20, train_s=8.0, publish_s=0.2)
# A lane for everything in flight and a trainer that always waits: short ones would win the race for a batch.
RACE = replace(VIRTUAL, lanes=1024, groups=256, samples=1, steps=16, train_s=0.05, publish_s=0.01)
# The same at four times the speed, so that it takes three minutes.
REAL = replace(VIRTUAL, speed=200.0, steps=13, train_s=2.0, publish_s=0.05)
ENGINES = """
hf_checkpoint: tiny:llama
prompt_data: examples/data/sums_train.jsonl
input_key: prompt
label_key: label
apply_chat_template: true
custom_rm_path: benchmarks/tool_reward.py:reward
rollout_batch_size: 8
n_samples_per_prompt: 4
rollout_max_response_len: 64
rollout_num_engines: 2
engine_threads: 1
trainer_threads: 1
lr: 1.0e-4
plots: false
before_after_samples: 0
"""

Runner = Callable[[Setting, dict[str, Any], Mend], Outcome]


class FirstCome(WindowBuffer):
    """Whatever is complete first is taken first."""

    def complete(self, key: str) -> None:
        del self._waiting[key]
        place = self._places[key] = len(self._places) and max(self._places.values()) + 1
        insort(self._complete, (place, key))

    @property
    def ready_count(self) -> int:
        return len(self._complete)


def first_come(plane: ControlPlane) -> None:
    """No window, and so no bound on the lag either."""
    plane.pool._open.order = FirstCome(1)
    plane._parts.gate.lead = None


def best(setting: Setting) -> float:
    """Seconds that no schedule can do with less."""
    lengths = [setting.seconds(tokens) for tokens in setting.lengths()]
    shop = Shop(setting.engines * setting.lanes, setting.groups * setting.samples, setting.train_s)
    found = best_makespan(lengths, shop)
    if setting.tool:
        ends = [length + tool_seconds(at // setting.samples) for at, length in enumerate(lengths)]
        found = max(found, max(ends) + setting.train_s)
    return found


def compared(
    name: str, setting: Setting, run: Runner, schedules: dict[str, dict[str, Any]] = SCHEDULES
) -> dict[str, Any]:
    """The schedules on one setting, `sync` first."""
    least, rows, sync_s = best(setting), dict[str, Any](), 0.0
    for schedule, options in schedules.items():
        outcome = run(setting, options, unchanged)
        sync_s = sync_s if schedule != "sync" else outcome.seconds
        rows[schedule] = {
            "seconds": round(outcome.seconds, 2),
            "share": round(least / outcome.seconds, 3),
            "gain": round(sync_s / outcome.seconds, 2),
            "lag": outcome.lag,
            "phases": {phase: round(seconds, 2) for phase, seconds in outcome.phases.items()},
        }
        shown = {key: rows[schedule][key] for key in ("seconds", "share", "gain", "lag")}
        print(f"{name:<18} {schedule:<15} {shown}", flush=True)
    return {"setting": vars(setting), "best_s": round(least, 2), "schedules": rows}


def lengths_test() -> dict[str, float]:
    """p-values: the lengths of the first half of a run's samples against those of other prompts. The first half:
    at the end of a run everything that was begun is trained, in whatever order."""
    other = [length_of(1 << 20 | at, at, RACE.median) for at in range(8000)]
    unbound = {**SCHEDULES["async"], "max_lead": LAG, "max_staleness": 1000}
    runs = {name: (options, unchanged) for name, options in SCHEDULES.items()} | {
        FIRST_COME: (unbound, first_come)
    }
    found: dict[str, float] = {}
    for name, (options, mend) in runs.items():
        lengths = run_virtual(RACE, options, mend).lengths
        half = lengths[: len(lengths) // 2]
        found[name] = round(same_distribution(half, other, RACE.seed), 5)
        print(f"{'lengths':<18} {name:<15} {len(half)} samples, p = {found[name]}", flush=True)
    return found


def virtual(quick: bool) -> dict[str, Any]:
    setting = replace(VIRTUAL, steps=8) if quick else VIRTUAL
    small = replace(setting, lanes=4, groups=16)
    cases = {
        "and a tool": replace(setting, tool=True),
        "training dominates": replace(setting, train_s=300.0, steps=6),
        "a quarter of it": small,
        "and train 4 s": replace(small, train_s=4.0),
        "and train 2 s": replace(small, train_s=2.0),
    }
    found = {"long tails": compared("long tails", setting, run_virtual, SCHEDULES | VARIANTS)}
    found |= {name: compared(name, case, run_virtual) for name, case in cases.items()}
    found["lengths"] = lengths_test()
    return found


def real(quick: bool) -> dict[str, Any]:
    setting = replace(REAL, steps=4) if quick else REAL

    def run(case: Setting, options: dict[str, Any], mend: Mend) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            return run_real(case, options, Path(folder), mend)

    return {"long tails": compared("engine processes", setting, run)}


def engines(quick: bool) -> dict[str, Any]:
    """Real engines and a real trainer: seconds of training by the summary."""
    steps = 4 if quick else 8
    found: dict[str, Any] = {"steps": steps}
    for schedule, options in SCHEDULES.items():
        with tempfile.TemporaryDirectory() as folder:
            config, run_dir = Path(folder) / "run.yaml", Path(folder) / "run"
            lines = [f"{name}: {value}" for name, value in {**options, "num_rollout": steps}.items()]
            config.write_text(ENGINES + "\n".join(lines) + "\n")
            command = [
                sys.executable,
                "-m",
                "turnout.cli.main",
                "train",
                str(config),
                "--run-dir",
                str(run_dir),
            ]
            subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
            summary = json.loads((run_dir / "summary.json").read_text())
        found[schedule] = {"seconds": summary["seconds_training"], "lag": summary.get("lag")}
        found[schedule]["gain"] = round(found["sync"]["seconds"] / found[schedule]["seconds"], 2)
        print(f"{'real engines':<18} {schedule:<15} {found[schedule]}", flush=True)
    return found


def targets(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By name: what was measured, what was asked for, whether that was met. Of the parts that ran."""
    rows: dict[str, tuple[float, str, bool]] = {}

    def least(name: str, value: float, limit: float) -> None:
        rows[name] = value, f">= {limit}", value >= limit

    for part, share in (("virtual", 0.95), ("real", 0.85)):
        for name in ("long tails", "and a tool"):
            case = found.get(part, {}).get(name)
            if case is not None:
                by = case["schedules"]
                least(f"{part}, {name}: gain of async", by["async"]["gain"], 2.0)
                least(f"{part}, {name}: share of async", by["async"]["share"], share)
                between = by["async"]["seconds"] < by["pipelined"]["seconds"] < by["sync"]["seconds"]
                rows[f"{part}, {name}: pipelined's gain"] = by["pipelined"]["gain"], "between", between
    if "virtual" in found:
        gain = found["virtual"]["training dominates"]["schedules"]["async"]["gain"]
        rows["virtual, training dominates: gain of async"] = gain, "<= 1.1", gain <= 1.1
        p = found["virtual"]["lengths"]
        least("lengths: least p of the schedules", min(p[name] for name in SCHEDULES), 0.01)
        rows["lengths: p of first come"] = p[FIRST_COME], "< 0.01", p[FIRST_COME] < 0.01
    if "engines" in found:
        least("real engines: gain of async", found["engines"]["async"]["gain"], 2.0)
    return {name: dict(zip(("value", "target", "met"), row)) for name, row in rows.items()}


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {"virtual": virtual, "real": real, "engines": engines}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.schedule", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--only", nargs="*", choices=[*PARTS], default=[*PARTS])
    given = parser.parse_args(words)
    found: dict[str, Any] = {"machine": describe(), "quick": given.quick}
    found |= {name: PARTS[name](given.quick) for name in given.only}
    found["targets"] = targets(found)
    for name, row in found["targets"].items():
        print(f"{name:<46} {row['value']:<8} {row['target']:<8} {'met' if row['met'] else 'NOT MET'}")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
