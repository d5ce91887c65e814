"""`kill -9` of `turnout train` at instants drawn over its phases, and what the resumed runs come to.

    python -m tests.resume_kills --kills 50 --free-kills 20 --seed 1 --json benchmarks/results/resume_kills.json

A run of the tiny model with two engines and twelve requests in flight is killed and started again with the same
command, a few times, and then ends by itself. In the deterministic modes it must equal a run that nobody killed:
ids of the groups of each step, digests of all samples, roots of all versions, learning rates, evaluations. In
ordinary async (mode `free`), steps that are trained again from recorded batches must give the recorded roots, no
group is lost or trained twice, and no token is over the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnout.core.events import (
    EvalDone,
    Event,
    GroupCompleted,
    GroupTrained,
    StepTrained,
    VersionCommitted,
    VersionPrepared,
    VersionPublished,
)
from turnout.observe.audit_log import as_one, of_kind, starts
from turnout.observe.eventlog import read_events
from turnout.observe.metrics import read_metrics
from turnout.rollout.ledger_read import LedgerReader

ROOT = Path(__file__).parents[1]
STEPS, SAVE = 8, 3
PHASES = ("rollout", "train", "publish", "prepare", "activate", "checkpoint", "between")
DEADLINE_S = 240.0
EXACT = ("--deterministic", "--dtype", "float32")
MODES = {
    "sync": EXACT,
    "pipelined": ("--schedule", "pipelined", *EXACT),
    "async": ("--schedule", "async", *EXACT),
    "free": ("--schedule", "async",),
}  # fmt: skip
COMMON = (
    "--engine-threads", "1", "--trainer-threads", "1", "--rollout-num-engines", "2", "--num-rollout", str(STEPS),
    "--save-interval", str(SAVE), "--rollout-batch-size", "3", "--n-samples-per-prompt", "4",
    "--rollout-max-response-len", "48", "--rollout-min-response-len", "24", "--eval-interval", "2",
    "--eval-num-prompts", "4", "--lr-decay-style", "linear", "--no-plots", "--no-tensorboard", "--panel", "off",
)  # fmt: skip


@dataclass
class Run:
    """One run directory with all that was done to it."""

    folder: Path
    mode: str
    kills: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        log = self.folder.with_name(f"{self.folder.name}.log").open("ab")
        words = [
            str(ROOT / "examples" / "tiny.yaml"),
            "--run-dir",
            str(self.folder),
            *COMMON,
            *MODES[self.mode],
        ]
        command = [sys.executable, "-m", "turnout.cli.main", "train", *words, *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def finish(self, *more: str) -> None:
        """Lets it run to its end."""
        process = self.start(*more)
        try:
            status = process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"{self.folder}: no end within {DEADLINE_S:g} s\n{self.words()}") from None
        assert status == 0, f"{self.folder}: exit status {status}\n{self.words()}"

    def kill(self, phase: str, step: int, delay: float, *more: str) -> None:
        """Starts it, and kills its controller `delay` seconds after this phase was seen at this step or later."""
        before = len(self.events)
        process = self.start(*more)
        end = time.monotonic() + DEADLINE_S
        while not self._reached(phase, step, before):
            assert process.poll() is None, f"it ended before {phase} of step {step}\n{self.words()}"
            assert time.monotonic() < end, f"no {phase} of step {step}\n{self.words()}"
            time.sleep(0.001)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        hit = self.phase_now()
        self.kills.append({"aimed": phase, "hit": hit, "step": step, "steps_done": self.steps_done})
        time.sleep(0.3)  # its engines see that their parent is gone

    @property
    def events(self) -> list[Event]:
        path = self.folder / "events.jsonl"
        return [event for _, event in read_events(path, lambda _: None)] if path.exists() else []

    @property
    def steps_done(self) -> int:
        steps = of_kind(as_one(self.events), StepTrained)
        return max((event.step + 1 for event in steps), default=0)

    def words(self) -> str:
        return self.folder.with_name(f"{self.folder.name}.log").read_text(errors="replace")[-3000:]

    def phase_now(self) -> str:
        """Where the controller was, from what it had written."""
        log = as_one(self.events)
        marks = (GroupTrained, VersionPublished, VersionPrepared, VersionCommitted, StepTrained)
        last = next((event for event in reversed(log) if isinstance(event, marks)), None)
        trained = {event.step for event in of_kind(log, GroupTrained)}
        if any((self.folder / "checkpoints").glob("step_*.tmp-*")):
            return "checkpoint"
        if isinstance(last, GroupTrained):
            return "publish"
        if isinstance(last, VersionPublished):
            return "prepare"
        if isinstance(last, VersionPrepared):
            return "activate"
        if self._recorded() - 1 not in trained and self._recorded() > 0:
            return "train"
        return "rollout" if isinstance(last, StepTrained) else "between"

    def _recorded(self) -> int:
        """How many steps have a recorded batch, of the newest incarnation."""
        try:
            connection = sqlite3.connect(f"file:{self.folder / 'ledger.sqlite'}?mode=ro", uri=True)
        except sqlite3.OperationalError:
            return 0
        try:
            select = "SELECT max(step) FROM batches WHERE incarnation = (SELECT max(incarnation) FROM owner)"
            row = connection.execute(select).fetchone()
            return 0 if row[0] is None else row[0] + 1
        except sqlite3.OperationalError:
            return 0
        finally:
            connection.close()

    def _reached(self, phase: str, step: int, before: int) -> bool:
        log = self.events
        if len(log) <= before or not starts(log[before:]):
            return False
        new = log[before:]
        if phase == "checkpoint":
            return any((self.folder / "checkpoints").glob("step_*.tmp-*")) and self.steps_done >= step
        if phase == "train":
            return self._recorded() > step
        steps = {event.step for event in of_kind(new, StepTrained)}
        if phase in ("rollout", "between"):
            return any(done >= step for done in steps)
        kind = {"publish": GroupTrained, "prepare": VersionPublished, "activate": VersionPrepared}[phase]
        if kind is VersionPrepared:
            late = {event.version for event in of_kind(new, VersionPublished) if event.step > step}
            return any(event.version in late for event in of_kind(new, VersionPrepared))
        return any(event.step >= step for event in new if isinstance(event, GroupTrained | VersionPublished)
                   and isinstance(event, kind))  # fmt: skip


def story(run: Run) -> dict[str, Any]:
    """What must be the same whether a run was killed or not."""
    log = as_one(run.events)
    done = {event.group: event.digest for event in of_kind(log, GroupCompleted)}
    steps: dict[int, list[str]] = {}
    for event in of_kind(log, GroupTrained):
        steps.setdefault(event.step, []).append(event.group)
    rows = [(step, row) for step, row in read_metrics(run.folder / "metrics.jsonl") if "train/lr" in row]
    return {
        "groups": steps,
        "samples": {group: done[group] for groups in steps.values() for group in groups},
        "roots": {event.step: event.root for event in of_kind(log, VersionPublished)},
        "lr": [(step, row["train/lr"]) for step, row in rows],
        "rewards": [(step, row["rollout/reward_mean"]) for step, row in rows],
        "evaluations": sorted((event.name, event.step, event.digest) for event in of_kind(log, EvalDone)),
    }


def check_end(run: Run) -> None:
    """What must hold of every run that was killed, deterministic or not."""
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["steps"] == STEPS, summary
    assert summary["audit"]["failed"] == 0, summary["audit"]["details"]
    assert summary["groups"]["lost"] == 0 and summary["groups"]["open"] == 0, summary["groups"]
    assert summary["groups"]["trained"] == 3 * STEPS, summary["groups"]
    assert summary["lag"]["max"] <= {"sync": 0, "pipelined": 1}.get(run.mode, 2), summary["lag"]
    ledger = LedgerReader.of(run.folder / "ledger.sqlite")
    states = ledger.count_states()
    assert sum(states[state] for state in states if state not in ("trained", "dropped", "requeued")) == 0, (
        states
    )
    ledger.close()


def retrained(run: Run) -> int:
    """Steps that were trained again from the same batches since the checkpoint; raises where a root differs."""
    log, again = run.events, 0
    parts = [log[a:b] for a, b in zip(starts(log), [*starts(log)[1:], len(log)])]
    known: dict[int, tuple[list[str], str]] = {}
    for part in parts:
        groups: dict[int, list[str]] = {}
        for event in of_kind(part, GroupTrained):
            groups.setdefault(event.step, []).append(event.group)
        same = True
        first = min(groups, default=0)
        for event in of_kind(part, VersionPublished):
            step = event.step - 1
            if step < first or step not in groups:
                continue
            same = same and (step not in known or known[step][0] == groups[step])
            if same and step in known:
                assert known[step][1] == event.root, f"step {step} came out otherwise than before"
                again += 1
            known[step] = groups[step], event.root
    return again


def kill_runs(folder: Path, mode: str, kills: int, rng: random.Random) -> list[Run]:
    """Runs of a mode with `kills` kills in all, up to four each; each is checked."""
    reference = Run(folder / f"{mode}-whole", mode)
    if mode != "free":
        reference.finish()
        wanted = story(reference)
    runs: list[Run] = []
    order = [PHASES[(at + rng.randrange(2)) % len(PHASES)] for at in range(kills)]
    while order:
        now, order = order[:4], order[4:]
        run = Run(folder / f"{mode}-{len(runs):02d}", mode)
        for at, phase in enumerate(now):
            step = rng.randrange(0, 2) + at * 2
            run.kill(phase, min(step, STEPS - 2), rng.random() ** 2 * 0.15)
        run.finish()
        check_end(run)
        if mode == "free":
            again = retrained(run)
            print(f"{run.folder.name}: {again} steps trained again to their recorded roots", flush=True)
        else:
            found = story(run)
            for key, value in wanted.items():
                assert found[key] == value, f"{run.folder}: {key}\n{found[key]}\nwithout kills:\n{value}"
        print(f"{run.folder.name}: {[kill['hit'] for kill in run.kills]} good", flush=True)
        runs.append(run)
    return runs


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.resume_kills")
    parser.add_argument("--kills", type=int, default=50, help="over the three deterministic modes")
    parser.add_argument("--free-kills", type=int, default=20, help="in ordinary async")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(words)
    rng = random.Random(given.seed)
    modes = {
        mode: given.kills // 3 + (at < given.kills % 3)
        for at, mode in enumerate(("sync", "pipelined", "async"))
    }
    modes["free"] = given.free_kills
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        for mode, kills in modes.items():
            runs += kill_runs(Path(folder), mode, kills, rng) if kills else []
    table = {mode: dict(Counter(k["hit"] for r in runs if r.mode == mode for k in r.kills)) for mode in modes}
    result = {
        "seed": given.seed,
        "kills": sum(len(run.kills) for run in runs),
        "by_phase": table,
        "failures": 0,
    }
    print(json.dumps(result, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
