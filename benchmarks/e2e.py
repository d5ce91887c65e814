"""Samples per second of `turnout train` against TRL's GRPOTrainer: same model, prompts, lengths, steps, machine.

    python -m benchmarks.e2e --json FILE [--workloads short fixed64 long_prompt] [--steps N] [--repeats N]

First every generation mode of TRL is tried on each workload (one counted step), then the fastest again with
torch.compile and with Intel's OpenMP; what can't run is reported with its reason. Then Turnout and the fastest of
TRL run in turns, `repeats` times `steps` steps each. The first step of every run is a warm-up and not counted:
compilers and caches do their work in it. Fails where the two sides did not do the same work.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import machine
from benchmarks.e2e_workloads import GROUP_SIZE, LEARNING_RATE, WORKLOADS, Prompts, Workload, make_prompts
from benchmarks.trl_env import environment_of, interpreter
from benchmarks.turnout_side import turnout_side
from turnout.train.model_zoo import fetch
from turnout.train.products import multiplies_bf16

RUN_DEADLINE_S = 3600.0
WARM_UP_STEPS = 1
PARTS = ("generation", "training", "other")
# Big tensors otherwise go back to the kernel after every operation and are cleared again: half of TRL's time.
ALLOCATOR = (
    "glibc.malloc.mmap_threshold=8589934592:glibc.malloc.trim_threshold=8589934592:glibc.malloc.hugetlb=1"
)


@dataclass(frozen=True)
class Variant:
    """A way to run TRL: a generation mode of `trl_side`, the model compiled or not, Intel's OpenMP or GNU's."""

    mode: str
    compiled: bool = False
    iomp: bool = False

    @property
    def name(self) -> str:
        return self.mode + "+compile" * self.compiled + "+iomp" * self.iomp

    def environment(self, python: Path) -> dict[str, str]:
        """Of the child process. The environment with vLLM has Intel's OpenMP, which vLLM advises to preload."""
        extra = {"GLIBC_TUNABLES": ALLOCATOR}
        if self.iomp:
            extra["LD_PRELOAD"] = str(python.parent.parent / "lib" / "libiomp5.so")
        return os.environ | extra


MODES = tuple(Variant(mode) for mode in ("transformers", "paged", "vllm", "vllm_unpacked"))


@dataclass(frozen=True)
class Bench:
    """One run of the benchmark. `weights` is the dtype of TRL's weights and optimizer."""

    model: Path
    folder: Path
    steps: int
    repeats: int
    threads: int
    weights: str


NOT_TRIED = {
    "vllm server": "VLLMClient.init_communicator raises NotImplementedError where the trainer is not on CUDA: "
    "TRL's weight transfer to a vLLM server is NCCL's"
}


class UnequalWork(Exception):
    """The two sides generated or trained different amounts."""


def trl_side(
    bench: Bench, workload: Workload, variant: Variant, prompts: Prompts, name: str
) -> dict[str, Any]:
    """One GRPOTrainer run in a child process of TRL's environment; its result, `error` set where it failed."""
    folder = bench.folder / name
    folder.mkdir(parents=True)
    request = {
        "model": str(bench.model),
        "prompts": prompts.steps,
        "group_size": GROUP_SIZE,
        "new_tokens": workload.new_tokens,
        "learning_rate": LEARNING_RATE,
        "generation": variant.mode,
        "torch_compile": variant.compiled,
        "weights": bench.weights,
        "threads": bench.threads,
        "micro_batch": workload.trl_micro_batch,
        "max_length": prompts.tokens + workload.new_tokens + 1,
    }
    (folder / "request.json").write_text(json.dumps(request))
    files = [str(folder / "request.json"), str(folder / "result.json")]
    script = str(Path(__file__).with_name("trl_side.py"))
    try:
        python = interpreter(environment_of(variant.mode))
        with (folder / "log").open("w") as log:
            subprocess.run(
                [str(python), script, *files],
                env=variant.environment(python),
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=RUN_DEADLINE_S,
                check=True,
            )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as problem:
        return {"error": f"{type(problem).__name__}: {problem}", "settings": request | {"prompts": "..."}}
    return json.loads((folder / "result.json").read_text())


def try_variants(bench: Bench, workload: Workload, broken: dict[str, str]) -> tuple[Variant, dict[str, Any]]:
    """TRL's fastest variant by one counted step, and what every one tried did.

    `broken` collects those that failed, which aren't tried again. Raises RuntimeError where none runs."""
    prompts = make_prompts(workload, bench.model, WARM_UP_STEPS + 1, seed=0)
    tried: dict[str, Any] = {}

    def seconds(variant: Variant) -> float:
        if variant.name not in broken:
            result = trl_side(bench, workload, variant, prompts, f"{workload.name}-try-{variant.name}")
            if result["error"] is None:
                tried[variant.name] = {"error": None} | summary(workload, [result])
                say(
                    f"{workload.name}: TRL {variant.name}: {tried[variant.name]['seconds_per_step']:.1f} s a step"
                )
                return tried[variant.name]["seconds_per_step"]
            broken[variant.name] = result["error"]
            say(f"{workload.name}: TRL {variant.name} can't run: {result['error'][:200]}")
        tried[variant.name] = {"error": broken[variant.name]}
        return math.inf

    best = min(MODES, key=seconds)
    if tried[best.name]["error"] is not None:
        raise RuntimeError(f"no mode of TRL runs on {workload.name}: {tried}")
    for name in ("compiled", "iomp"):
        candidate = replace(best, **{name: True})
        if name == "iomp" and environment_of(best.mode) != "trl-vllm":
            continue  # only that environment has it
        if seconds(candidate) < tried[best.name]["seconds_per_step"]:
            best = candidate
    return best, tried


def measure(
    bench: Bench, workload: Workload, broken: dict[str, str], chosen: Variant | None
) -> tuple[Variant, dict[str, Any]]:
    """Everything about one workload, and TRL's variant: `chosen`, or the fastest of all. Raises UnequalWork,
    and RuntimeError where a side can't run."""
    best, tried = (chosen, {}) if chosen is not None else try_variants(bench, workload, broken)
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    draws = [
        make_prompts(workload, bench.model, WARM_UP_STEPS + bench.steps, seed=1 + r)
        for r in range(bench.repeats)
    ]
    for repeat, prompts in enumerate(draws):
        folder = bench.folder / f"{workload.name}-turnout-{repeat}"
        ours.append(turnout_side(workload, prompts, bench.model, folder, RUN_DEADLINE_S))
        theirs.append(trl_side(bench, workload, best, prompts, f"{workload.name}-trl-{repeat}"))
        for side, result in (("turnout", ours[-1]), ("trl", theirs[-1])):
            if result["error"] is not None:
                raise RuntimeError(f"{side} failed on {workload.name}: {result['error']}")
        check_equal(workload, prompts, ours[-1], theirs[-1])
    turnout, trl = summary(workload, ours), summary(workload, theirs)
    return best, {
        "samples_per_step": workload.samples_per_step,
        "prompt_tokens": draws[0].tokens,
        "new_tokens": workload.new_tokens,
        "ratio": turnout["samples_per_second"] / trl["samples_per_second"],
        "turnout": turnout | {"settings": ours[0]["settings"]},
        "trl": trl | {"variant": best.name, "settings": theirs[0]["settings"]} | about(theirs[0]),
        "trl_variants": tried,
    }


def about(result: dict[str, Any]) -> dict[str, Any]:
    """What TRL ran with."""
    return {
        name: result[name] for name in ("weight_dtype", "optimizer", "threads", "versions", "peak_rss_gib")
    }


def check_equal(workload: Workload, prompts: Prompts, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Both sides: the same optimizer steps, prompt tokens and response tokens in every step."""
    steps = len(prompts.steps)
    expected = {
        "optimizer_steps": steps,
        "response_tokens": [workload.tokens_per_step] * steps,
        "prompt_tokens": [prompts.tokens * workload.samples_per_step] * steps,
    }
    for side, result in (("turnout", ours), ("trl", theirs)):
        found = {
            "optimizer_steps": result["optimizer_steps"],
            "response_tokens": [step["response_tokens"] for step in result["steps"]],
            "prompt_tokens": [step["prompt_tokens"] for step in result["steps"]],
        }
        if found != expected:
            raise UnequalWork(f"{workload.name}, {side}: did {found}, asked for {expected}")


def summary(workload: Workload, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over all counted steps of all runs."""
    counted = [step for run in runs for step in run["steps"][WARM_UP_STEPS:]]
    seconds = [step["total"] for step in counted]
    names = sorted({key for step in counted for key in step} - {"total", "shortest", "longest"})
    middle = {name: median(step[name] for step in counted) for name in names}
    return {
        "samples_per_second": workload.samples_per_step / median(seconds),
        "tokens_per_second": workload.tokens_per_step / median(seconds),
        "seconds_per_step": median(seconds),
        "seconds_range": [min(seconds), max(seconds)],
        "seconds_of_part": {part: middle.pop(part) for part in PARTS},
        "medians": middle,
        "steps_counted": len(counted),
        "optimizer_steps": sum(run["optimizer_steps"] for run in runs),
        "response_tokens": sum(step["response_tokens"] for run in runs for step in run["steps"]),
    }


def say(line: str) -> None:
    """Progress, on stderr."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.e2e", description="Turnout against TRL's GRPOTrainer")
    # a processor without products of bf16 takes many times as long for them as for float32's
    faster = "bfloat16" if multiplies_bf16() else "float32"
    parser.add_argument("--json", type=Path, required=True, help="where the results go")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--steps", type=int, default=2, help="counted steps of a run")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each side, in turns")
    parser.add_argument(
        "--try-on",
        nargs="+",
        choices=WORKLOADS,
        default=list(WORKLOADS),
        help="workloads on which every variant of TRL is tried; the others take the fastest of the one before",
    )
    parser.add_argument(
        "--trl-mode", choices=[variant.name for variant in MODES], help="take this mode and try no other"
    )
    parser.add_argument("--threads", type=int, default=machine.cpus(), help="threads of TRL")
    parser.add_argument("--trl-weights", choices=("bfloat16", "mixed", "float32"), default=faster)
    parser.add_argument("--keep", type=Path, help="folder for logs and runs; a temporary one otherwise")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; 0, or 1 where the sides differ or one failed."""
    args = read_arguments(argv)
    started = time.monotonic()
    results: dict[str, Any] = {}
    report: dict[str, Any] = {
        "benchmark": "e2e",
        "model": "SmolLM2-135M-Instruct, from a 4-bit GGUF, as bf16",
        "machine": machine.describe(),
        "steps": args.steps,
        "repeats": args.repeats,
        "warm_up_steps_per_run": WARM_UP_STEPS,
        "trl_environment": {"GLIBC_TUNABLES": ALLOCATOR},
        "trl_variants_tried_on": [] if args.trl_mode is not None else args.try_on,
        "trl_not_tried": NOT_TRIED,
        "error": None,
        "workloads": results,
    }
    broken: dict[str, str] = {}
    chosen = Variant(args.trl_mode) if args.trl_mode is not None else None
    with tempfile.TemporaryDirectory(prefix="turnout-e2e-") as temporary:
        folder = (args.keep or Path(temporary)).absolute()
        bench = Bench(fetch(), folder, args.steps, args.repeats, args.threads, args.trl_weights)
        for name in args.workloads:
            known = None if name in args.try_on and args.trl_mode is None else chosen
            try:
                chosen, results[name] = measure(bench, WORKLOADS[name], broken, known)
            except (UnequalWork, RuntimeError) as problem:
                report["error"] = f"{type(problem).__name__}: {problem}"
            else:
                say(f"{name}: {results[name]['ratio']:.2f} x TRL ({results[name]['trl']['variant']})")
            report["seconds_total"] = round(time.monotonic() - started, 1)
            args.json.write_text(json.dumps(report, indent=2) + "\n")
            if report["error"] is not None:
                print(report["error"], file=sys.stderr)
                return 1
    for name, result in results.items():
        print(
            f"{name:12} {result['turnout']['samples_per_second']:8.2f} samples/s, TRL "
            f"{result['trl']['samples_per_second']:8.2f} ({result['trl']['variant']}), ratio {result['ratio']:.2f}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
