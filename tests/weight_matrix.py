"""`turnout train` with every legal pair of mode and transport, every encoding, and engines of one and two ranks.

    python -m tests.weight_matrix --json benchmarks/results/weight_matrix.json [--only NAME ...]

Each run is examples/tiny.yaml, deterministic, with --check-weight-update-equal, so it ends with an error where the
digest that an engine computes anew from its live tensors is not the trainer's after some update. Compared are then,
between all runs of the same dtype and ranks: the root of every version, token ids and log-probs of every group, the
trainer's metrics, and token ids and log-probs of the evaluation after the last update; and the last of these with
what a fresh engine gives that loads the run's --save-hf. Any difference is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnout.config.check_weights import PAIRS
from turnout.observe.metrics import read_metrics, repeatable
from turnout.weights.codecs.registry import CODECS

ROOT = Path(__file__).parents[1]
DEADLINE_S = 600.0
STEPS = 3
# So small that a few in a hundred bf16 weights change a step: a delta is worth it. In float32 all do.
RATE = "2e-5"
WAYS = [
    pair
    for pair, reason in PAIRS.items()
    if reason is None and pair[1] not in ("checkpoint-engine", "follower")  # CUDA only; async only
]
SKIPPED = {("float32", "full", "tensor"), ("float32", "full", "group")}
COMMON = (
    "--deterministic", "--engine-threads", "1", "--trainer-threads", "1", "--num-rollout", str(STEPS),
    "--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--eval-num-prompts", "4", "--eval-sampled",
    "--eval-temperature", "0", "--no-plots", "--check-weight-update-equal", "--digest-audit-interval", "2",
    "--update-weight-buffer-size", str(1 << 20),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One run. `encoding` is empty where none is given."""

    mode: str
    transport: str
    encoding: str
    dtype: str
    ranks: int

    @property
    def name(self) -> str:
        parts = [self.mode, self.transport, self.encoding, {"bfloat16": "bf16"}.get(self.dtype, "fp32")]
        return "-".join([*filter(None, parts), f"tp{self.ranks}"])

    @property
    def options(self) -> tuple[str, ...]:
        encoding = ("--update-weight-encoding", self.encoding) if self.encoding else ()
        return (
            *("--update-weight-mode", self.mode, "--update-weight-transport", self.transport, *encoding),
            *("--dtype", self.dtype, "--lr", RATE),
            *("--rollout-num-gpus-per-engine", str(self.ranks)),
        )  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """What a run came to. `curves` and `groups` and `evals` are compared between runs; `kinds` is the encoding of
    every version, empty for a full one."""

    roots: list[str]
    curves: list[tuple[int, dict[str, Any]]]
    groups: dict[str, str]
    evals: list[str]
    kinds: list[str]
    densities: list[float]
    bytes: list[int]
    levels: list[str]


def cases(dtypes: tuple[str, ...] = ("bfloat16", "float32"), ranks: tuple[int, ...] = (1, 2)) -> list[Case]:
    """All of them; in float32, where every weight changes in a step, one encoding and one full transport stand for
    all."""
    found = []
    for dtype in dtypes:
        for count in ranks:
            for mode, transport in WAYS:
                if (dtype, mode, transport) in SKIPPED:
                    continue
                encodings = list(CODECS) if (mode, transport) == ("delta", "disk") else [""]
                if dtype == "float32":
                    encodings = [""]
                found += [Case(mode, transport, encoding, dtype, count) for encoding in encodings]
    return found


def run(case: Case, folder: Path) -> Seen:
    """Raises RuntimeError with the run's last words where it fails."""
    words = ["train", "examples/tiny.yaml", "--run-dir", str(folder / "run"), "--save-hf", str(folder / "hf")]
    _turnout(*words, *COMMON, *case.options)
    rows = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    kind = {name: [row for row in rows if row["event"] == name] for name in {row["event"] for row in rows}}
    published = kind["VersionPublished"]
    curves = [(step, repeatable(row)) for step, row in read_metrics(folder / "run" / "metrics.jsonl")]
    return Seen(
        [row["root"] for row in published],
        [(step, {k: v for k, v in row.items() if not k.startswith("weights/")}) for step, row in curves],
        {row["group"]: row["digest"] for row in kind["GroupCompleted"]},
        [row["digest"] for row in kind["EvalDone"]],
        [row["encoding"] for row in published],
        [row["density"] for row in published],
        [row["bytes"] for row in published],
        sorted({row["level"] for row in kind["VersionAttested"]}),
    )


def fresh(case: Case, folder: Path) -> list[str]:
    """Digests over token ids and log-probs of a fresh engine that loads the final export."""
    target = folder / "fresh.json"
    words = ["eval", "examples/tiny.yaml", "--hf-checkpoint", str(folder / "hf"), "--json", str(target)]
    options = [word for word in COMMON if word != "--check-weight-update-equal"]
    _turnout(*words, *options, "--dtype", case.dtype, "--rollout-num-gpus-per-engine", str(case.ranks))
    return [row["digest"] for row in json.loads(target.read_text())]


def differences(case: Case, seen: Seen, first: Seen | None, fresh_evals: list[str]) -> list[str]:
    """What is not as it must be; `first` is another run of the same dtype and ranks."""
    found = []
    if len(seen.roots) != STEPS or len(set(seen.roots)) != STEPS:
        found.append(f"{len(set(seen.roots))} roots in {STEPS} steps")
    if seen.levels != ["memory"]:
        found.append(f"attested at {seen.levels}")
    if seen.evals[-len(fresh_evals) :] != fresh_evals:
        found.append("a fresh engine with the final export gives other tokens or log-probs")
    if case.mode == "delta" and case.dtype == "bfloat16" and not all(seen.kinds):
        found.append(f"versions were sent whole: {seen.kinds}, densities {seen.densities}")
    compared = ("roots", "curves", "groups", "evals") if first is not None else ()
    differ = [name for name in compared if getattr(seen, name) != getattr(first, name)]
    return [*found, *(f"{name} are not those of another run" for name in differ)]


def matrix(chosen: list[Case], folder: Path, target: Path | None) -> list[str]:
    """The names of cases in which something differs. `target` gets one row per case, after each."""
    rows: list[dict[str, Any]] = []
    firsts: dict[tuple[str, int], tuple[Seen, list[str]]] = {}
    for case in chosen:
        place, began = folder / case.name, time.monotonic()
        try:
            seen = run(case, place)
        except RuntimeError as fault:
            rows.append({"case": case.name, "differences": [str(fault)]})
            _told(rows, target)
            continue
        key = case.dtype, case.ranks
        if key not in firsts:
            firsts[key] = seen, fresh(case, place)
        first, fresh_evals = firsts[key]
        found = differences(case, seen, first, fresh_evals)
        row = {"case": case.name, "differences": found, "bytes": seen.bytes, "encodings": seen.kinds}
        rows.append({**row, "densities": seen.densities, "seconds": round(time.monotonic() - began, 1)})
        _told(rows, target)
    return [row["case"] for row in rows if row["differences"]]


def _told(rows: list[dict[str, Any]], target: Path | None) -> None:
    """Rows of other cases that `target` holds from an earlier run stay in it."""
    last = rows[-1]
    print(f"{last['case']}: {'; '.join(last['differences']) or 'equal'}", flush=True)
    if target is not None:
        mine, names = {row["case"] for row in rows}, [case.name for case in cases()]
        old = json.loads(target.read_text())["cases"] if target.exists() else []
        every = rows + [row for row in old if row["case"] in names and row["case"] not in mine]
        every.sort(key=lambda row: names.index(row["case"]))
        failed = [row["case"] for row in every if row["differences"]]
        missing = [name for name in names if name not in {row["case"] for row in every}]
        told = {"steps": STEPS, "failed": failed, "missing": missing, "cases": every}
        target.write_text(json.dumps(told, indent=1) + "\n")


def _turnout(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "turnout.cli.main", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TURNOUT_DEBUG": "0"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"turnout {' '.join(words)}: {done.stderr[-2000:]}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    arguments = parser.parse_args(argv)
    unknown = set(arguments.only) - {case.name for case in cases()}
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    chosen = [case for case in cases() if not arguments.only or case.name in arguments.only]
    with tempfile.TemporaryDirectory(prefix="turnout-matrix-") as folder:
        return 1 if matrix(chosen, Path(folder), arguments.json) else 0


if __name__ == "__main__":
    sys.exit(main())
