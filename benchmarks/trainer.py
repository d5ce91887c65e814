"""A GRPO step of the trainer against transformers with FSDP2 on padded batches: tokens per second, peak memory.

    python -m benchmarks.trainer --json FILE [--processes 1 2] [--works W ...] [--rounds N] [--share N]
        [--quick]

SmolLM2-135M (--quick: the tiny model and a few samples, the search only: a look at the paths, no result). For
each workload of benchmarks.trainer_work and each number of processes: each side finds its best setting by search
(its micro-batch size, one step each; the padded side computes in bf16 or float32, whichever is faster on one
short group), then both are measured there in turns, in fresh processes; figures are medians over the processes'
own. Tokens are those of all samples, prompts too, however often they are computed. Memory is the resident set at
its highest in a step, less what the process had before the model and less weights, gradients, moments and
compute copies. --share N takes an N-th of the groups, for a slow machine. Keys: `ratio_tokens_per_second` (groups
with a shared prompt), `ratio_long_prompt`, `ratio_fixed`, with the first number of processes, and
`ratio_peak_memory` (Turnout's share, shared prompt); all others under `processes`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import machine
from benchmarks.trainer_sides import Job
from benchmarks.trainer_work import WORK
from turnout.train.model_zoo import fetch, resolve_checkpoint

SETTINGS = {"turnout": (1024, 2048, 4096, 8192), "padded": (1, 2, 4, 8, 16, 32)}
QUICK = {"turnout": (1024, 2048), "padded": (2, 8)}
DTYPES = ("bfloat16", "float32")
DEADLINE_S = 3600
RATIOS = {
    "ratio_tokens_per_second": ("shared", "ratio"),
    "ratio_long_prompt": ("long_prompt", "ratio"),
    "ratio_fixed": ("fixed", "ratio"),
    "ratio_peak_memory": ("shared", "ratio_memory"),
}


def run(job: Job) -> dict[str, Any]:
    """One side, on as many processes as it has ranks; what rank 0 prints."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [replace(job, rank=rank, meeting=f"{folder}/meeting") for rank in range(job.ranks)]
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.trainer_sides", json.dumps(asdict(rank))],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in ranks
        ]
        try:
            told = [process.communicate(timeout=DEADLINE_S)[0] for process in started]
        finally:
            for process in started:
                process.kill()
    if any(process.returncode for process in started):
        raise RuntimeError(f"{job} ended with {[process.returncode for process in started]}")
    return json.loads(told[0].splitlines()[-1])


def seconds_by_dtype(job: Job) -> dict[str, float]:
    """A step of one short group, padded, in each: bf16 takes many times as long on a processor that lacks it."""
    one = replace(job, side="padded", work="fixed", settings=(2,), share=8)
    return {dtype: run(replace(one, dtype=dtype))["rows"][0]["seconds"] for dtype in DTYPES}


def compared(job: Job, settings: dict[str, tuple[int, ...]], rounds: int) -> dict[str, Any]:
    """Both sides at their best settings; without rounds the search is all there is."""
    found: dict[str, Any] = {}
    best: dict[str, Job] = {}
    for side, tried in settings.items():
        started = replace(job, side=side, rounds=1)
        search = run(replace(started, settings=tried))
        fastest = min(search["rows"], key=lambda row: row["seconds"])
        found[side] = {"search": search["rows"], "best": fastest["setting"], "tokens": search["tokens"]}
        found[side]["measured"] = [] if rounds else [fastest]
        best[side] = replace(started, settings=(int(fastest["setting"]),), rounds=3)
    for _ in range(rounds):
        for side, one in best.items():
            found[side]["measured"].append(run(one)["rows"][0])
    for side in best:
        for key in ("tokens_per_second", "bytes_above_state"):
            found[side][key] = median(row[key] for row in found[side]["measured"])
    found["ratio"] = found["turnout"]["tokens_per_second"] / found["padded"]["tokens_per_second"]
    found["ratio_memory"] = found["turnout"]["bytes_above_state"] / found["padded"]["bytes_above_state"]
    return found


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that was asked for; the file is written after each workload, as far as it is."""
    quick = arguments.quick
    model = resolve_checkpoint("tiny:llama") if quick else fetch()
    share = arguments.share or (4 if quick else 1)
    by_count: dict[str, Any] = {}
    report = {
        "benchmark": "trainer",
        "quick": quick,
        "share": share,
        "model": model.name,
        "machine": machine.describe(),
        "workloads": {name: asdict(WORK[name]) for name in arguments.works},
        "processes": by_count,
    }
    for ranks in arguments.processes:
        job = Job("", str(model), "", (), 1, max(1, machine.cpus() // ranks), share=share, ranks=ranks)
        seconds = seconds_by_dtype(job)
        job = replace(job, dtype=min(seconds, key=seconds.__getitem__))
        found = by_count[str(ranks)] = {"padded_seconds_by_dtype": seconds}
        for work in arguments.works:
            found[work] = compared(
                replace(job, work=work), QUICK if quick else SETTINGS, 0 if quick else arguments.rounds
            )
            if ranks == arguments.processes[0]:
                report |= {key: found[work][name] for key, (of, name) in RATIOS.items() if of == work}
            arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--works", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--share", type=int, help="divides the groups of a step, for a slow machine (1; quick: 4)"
    )
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments)
    print({key: round(value, 3) for key, value in found.items() if key.startswith("ratio")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
