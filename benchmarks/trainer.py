"""A GRPO step of the trainer against transformers with FSDP2 on padded batches: tokens per second, peak memory.

    python -m benchmarks.trainer --json FILE [--processes 1 2] [--rounds N] [--quick]

SmolLM2-135M (--quick: the tiny model and a few samples, the search only: a look at the paths, no result). For
each workload of benchmarks.trainer_work and each number of processes: each side finds its best setting by search
(its micro-batch size, one step each), then both are measured there in turns, in fresh processes; figures are
medians over the processes' own. Tokens are those of all samples, prompts too, however often they are computed.
Memory is the resident set at its highest in a step, less what the process had before the model and less weights,
gradients, moments and compute copies. Keys: `ratio_tokens_per_second` (groups with a shared prompt),
`ratio_long_prompt`, `ratio_fixed`, with one process, and `ratio_peak_memory` (Turnout's share, shared prompt); of
more processes under `processes`.
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
DEADLINE_S = 3600


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


def compared(job: Job, settings: dict[str, tuple[int, ...]], rounds: int) -> dict[str, Any]:
    """Both sides at their best settings; without rounds the search is all there is."""
    found: dict[str, Any] = {}
    best: dict[str, Job] = {}
    for side, tried in settings.items():
        search = run(replace(job, side=side, settings=tried, rounds=1))
        fastest = min(search["rows"], key=lambda row: row["seconds"])
        found[side] = {"search": search["rows"], "best": fastest["setting"], "tokens": search["tokens"]}
        found[side]["measured"] = [] if rounds else [fastest]
        best[side] = replace(job, side=side, settings=(int(fastest["setting"]),), rounds=3)
    for _ in range(rounds):
        for side, one in best.items():
            found[side]["measured"].append(run(one)["rows"][0])
    for side in best:
        for key in ("tokens_per_second", "bytes_above_state"):
            found[side][key] = median(row[key] for row in found[side]["measured"])
    found["ratio"] = found["turnout"]["tokens_per_second"] / found["padded"]["tokens_per_second"]
    found["ratio_memory"] = found["turnout"]["bytes_above_state"] / found["padded"]["bytes_above_state"]
    return found


def measure(processes: list[int], rounds: int, quick: bool) -> dict[str, Any]:
    model = resolve_checkpoint("tiny:llama") if quick else fetch()
    by_count: dict[str, Any] = {}
    for ranks in processes:
        threads = max(1, machine.cpus() // ranks)
        job = Job("", str(model), "", (), 1, threads, share=4 if quick else 1, ranks=ranks)
        by_count[str(ranks)] = {
            work: compared(replace(job, work=work), QUICK if quick else SETTINGS, rounds) for work in WORK
        }
    first = by_count[str(processes[0])]
    return {
        "benchmark": "trainer",
        "quick": quick,
        "model": model.name,
        "machine": machine.describe(),
        "ratio_tokens_per_second": first["shared"]["ratio"],
        "ratio_long_prompt": first["long_prompt"]["ratio"],
        "ratio_fixed": first["fixed"]["ratio"],
        "ratio_peak_memory": first["shared"]["ratio_memory"],
        "workloads": {name: asdict(work) for name, work in WORK.items()},
        "processes": by_count,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    rounds = 0 if arguments.quick else arguments.rounds
    found = measure(arguments.processes, rounds, arguments.quick)
    arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print({key: round(value, 3) for key, value in found.items() if key.startswith("ratio")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
