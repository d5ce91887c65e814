"""How long a run does without what it lost: `python -m benchmarks.recovery --json FILE [--repeats 3]`.

Runs of examples/tiny.yaml, async, with real processes and real signals. Seconds by the events' own times, from the
signal on, medians of `repeats` (each of another engine, so that the pause before a restart is the first one, 1 s).

engine_sigkill, engine_sigstop, decode_sigkill
    unroutable: fenced; replaced: a new process serves; serving: that has attested the current version, and is asked
router_sigkill
    unroutable: the run knows; replaced: a new router; serving: the first group that is complete after that
ray_node: all processes of a node of a Ray cluster on this machine are killed; a node with room is there
    as for an engine
controller_sigkill (the trainer is in the same process)
    replaced: the same command, given at once, goes on with the run; serving: its next train step
stall
    unroutable: the only engine is the root of what the run waits for (waits.json); serving: that was told as a
    stall, by default 25 s after it moved last

`unroutable` of a stopped process follows from the health probes (--rollout-health-check-interval, -timeout: 1 s and
5 s, three in a row). A kind that can't be measured here (no smg, no Ray), or was not asked for, is null.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.ray_nodes import RayNodes

from benchmarks.machine import describe

ROOT = Path(__file__).parents[1]
DEADLINE_S, POLL_S = 180.0, 0.05
MARKS = ("unroutable", "replaced", "serving")
TOLERANT = ("--use-fault-tolerance", "--min-engines", "1")
Row = dict[str, Any]
Measured = dict[str, float]  # seconds by mark


class Run:
    """One run of the tiny model, in its own process; `words` are its options."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder, self._words = folder, words
        self.start()

    def start(self) -> None:
        """The same command, each time."""
        common = ("--schedule", "async", "--num-rollout", "100000", "--engine-threads", "1", "--no-plots")
        words = (*common, "--skip-eval-before-train", "--run-dir", str(self.folder), *self._words)
        self.said = self.folder.with_suffix(".log")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "turnout.cli.main", "train", str(ROOT / "examples/tiny.yaml"), *words],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=self.said.open("a"),
        )

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def events(self) -> list[Row]:
        path = self.folder / "events.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().split("\n") if line.endswith("}")]

    def waits(self) -> Row:
        path = self.folder / "waits.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def after(self, since: float, kinds: Sequence[str], **fields: str) -> Row:
        """The first event of these kinds since then (seconds since the epoch), waited for."""

        def found() -> Row | None:
            for row in self.events():
                same = all(row.get(name) == value for name, value in fields.items())
                if row["event"] in kinds and row["at"] >= since and same:
                    return row
            return None

        return self.wait(f"{' or '.join(kinds)} {fields}", found)

    def wait(self, what: str, found: Callable[[], Any]) -> Any:
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            if value := found():
                return value
            if self.process.poll() is not None:
                said = self.said.read_text()[-500:]
                raise SystemExit(f"the run ended with {self.process.returncode} before {what}: {said}")
            time.sleep(POLL_S)
        raise SystemExit(f"no {what} within {DEADLINE_S:g} s")

    def settled(self) -> None:
        """Two more steps are done: whatever was lost before is made up for."""
        for _ in range(2):
            self.after(time.time(), ["StepTrained"])


def killed_engines(run: Run, number: signal.Signals, victims: Sequence[str]) -> list[Measured]:
    found: list[Measured] = []
    for name in victims:
        run.settled()
        [*_, life] = [row for row in run.events() if row["event"] == "EngineReady" and row["engine"] == name]
        os.kill(life["pid"], number)
        at = time.time()
        unroutable = run.after(at, ["EngineLost", "EngineFenced"], engine=name)["at"]
        replaced = run.after(at, ["EngineReady"], engine=name)["at"]
        serving = run.after(replaced, ["VersionAttested"], engine=name)["at"]
        found.append(_marks(at, unroutable, replaced, serving))
    return found


def killed_router(run: Run, repeats: int) -> list[Measured]:
    found: list[Measured] = []
    for _ in range(repeats):
        run.settled()
        guard = [row for row in run.events() if row["event"] == "RouterReady"][-1]["pid"]
        [router] = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
        os.kill(int(router), signal.SIGKILL)
        at = time.time()
        unroutable = run.after(at, ["RouterLost"])["at"]
        replaced = run.after(at, ["RouterReady"])["at"]
        found.append(_marks(at, unroutable, replaced, run.after(replaced, ["GroupCompleted"])["at"]))
    return found


def killed_nodes(run: Run, nodes: RayNodes, repeats: int) -> list[Measured]:
    """Every node holds one engine."""
    found: list[Measured] = []
    for number in range(1, repeats + 1):
        run.settled()
        nodes.do("add 1")  # not before all engines lie on the nodes that there were
        at = time.time()
        nodes.do(f"remove {number}")
        lost = run.after(at, ["EngineLost", "EngineFenced"])
        replaced = run.after(at, ["EngineReady"], engine=lost["engine"])["at"]
        serving = run.after(replaced, ["VersionAttested"], engine=lost["engine"])["at"]
        found.append(_marks(at, lost["at"], replaced, serving))
    return found


def killed_controller(run: Run, repeats: int) -> list[Measured]:
    found: list[Measured] = []
    for _ in range(repeats):
        run.settled()
        run.process.kill()
        at = time.time()
        run.process.wait()
        run.start()
        replaced = run.after(at, ["RunStarted"])["at"]
        found.append(_marks(at, at, replaced, run.after(replaced, ["StepTrained"])["at"]))
    return found


def stalled(run: Run, repeats: int) -> list[Measured]:
    found: list[Measured] = []
    for _ in range(repeats):
        run.settled()
        [engine] = [row for row in run.events() if row["event"] == "EngineReady"]
        os.kill(engine["pid"], signal.SIGSTOP)
        at = time.time()

        def named(since: float = at) -> float:
            row = run.waits()
            stands = row.get("at", 0.0) >= since and "is stopped (SIGSTOP)" in row["line"]
            return row["at"] if stands else 0.0

        cause = run.wait("a cause", named)
        told = run.after(at, ["RunStalled"], root=f"engine {engine['engine']}")["at"]
        found.append(_marks(at, cause, cause, told))
        os.kill(engine["pid"], signal.SIGCONT)
    return found


def _marks(at: float, *times: float) -> Measured:
    return {mark: time_s - at for mark, time_s in zip(MARKS, times)}


def summarised(found: Sequence[Measured] | None) -> Row | None:
    """By mark the median of the repetitions and all of them, seconds; None where there are none."""
    if not found:
        return None
    return {
        mark: {
            "median_s": round(median(one[mark] for one in found), 2),
            "all_s": [round(one[mark], 2) for one in found],
        }
        for mark in MARKS
    }


def halves(folder: Path, decode: int) -> tuple[str, ...]:
    """The options of a run with one prefill engine and so many decode engines."""
    groups = [{"worker_type": kind, "num_gpus": n} for kind, n in (("prefill", 1), ("decode", decode))]
    path = folder / "pd.json"
    path.write_text(json.dumps({"sglang": [{"name": "actor", "server_groups": groups}]}))
    return ("--sglang-config", str(path))


def measure(kind: str, folder: Path, repeats: int) -> list[Measured] | None:
    """The repetitions of one kind; None where it can't be measured on this machine."""
    if kind == "router_sigkill" and importlib.util.find_spec("smg") is None:
        return None
    if kind == "ray_node" and importlib.util.find_spec("ray") is None:
        return None
    many = ("--rollout-num-engines", str(repeats + 1))
    words = {
        "decode_sigkill": ("--use-fault-tolerance", "--min-engines", "2", *halves(folder, repeats + 1)),
        "router_sigkill": (*TOLERANT, "--rollout-num-engines", "2", "--router", "smg"),
        "controller_sigkill": ("--save-interval", "1", "--rollout-num-engines", "2"),
        "stall": ("--rollout-health-check-timeout", "600"),
    }.get(kind, (*TOLERANT, *many))
    if kind == "ray_node":
        return on_nodes(folder / kind, words, repeats)
    run = Run(folder / kind, *words)
    try:
        if kind == "router_sigkill":
            return killed_router(run, repeats)
        if kind == "controller_sigkill":
            return killed_controller(run, repeats)
        if kind == "stall":
            return stalled(run, repeats)
        number = signal.SIGSTOP if kind == "engine_sigstop" else signal.SIGKILL
        name = "actor.decode2" if kind == "decode_sigkill" else "engine"
        return killed_engines(run, number, [f"{name}-{index}" for index in range(repeats)])
    finally:
        run.end()


def on_nodes(folder: Path, words: Sequence[str], repeats: int) -> list[Measured]:
    nodes = RayNodes(*[1] * (repeats + 1))
    try:
        run = Run(folder, *words, "--cluster", "ray", "--ray-address", nodes.address)
        try:
            return killed_nodes(run, nodes, repeats)
        finally:
            run.end()
    finally:
        nodes.end()


KINDS = (
    "engine_sigkill",
    "engine_sigstop",
    "decode_sigkill",
    "router_sigkill",
    "ray_node",
    "controller_sigkill",
    "stall",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    asked = parser.parse_args()
    row: Row = {"machine": describe(), "setup": {"model": "tiny:llama", "repeats": asked.repeats}}
    with tempfile.TemporaryDirectory(prefix="turnout-recovery-") as folder:
        for kind in KINDS:
            found = None if kind not in asked.only else measure(kind, Path(folder), asked.repeats)
            row[kind] = summarised(found)
            print(json.dumps({kind: row[kind]}), flush=True)
    asked.json.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
