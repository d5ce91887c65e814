"""A run that is never left in peace: `python -m tests.fleet_soak --minutes 10 --json FILE`.

examples/tiny.yaml, async, two prefill and two decode engines, with --use-fault-tolerance and --engine-linger, and
an engine of somebody else, added by `turnout engines add` to each life of the controller. Every 5 s something
befalls it, drawn by a seed: a SIGKILL or a SIGSTOP of some seconds for an engine of either half, the external one
killed and replaced at its address, all requests of an engine aborted by somebody else, an engine paused by somebody
else, a SIGKILL or SIGTERM of the controller, which is then started again by the same command. Then the same run
without faults, for half of the time, at most ten minutes.

The JSON: by kind of fault how many, in which phases, seconds until it was made up for (killed engines: until they
attest again; all else: the next train step); the steps per minute of both runs; memory and open files of the
controller; what the run's own audit says of lost and doubled groups, lags and versions. Exit status 1 where a
promise was broken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import describe
from benchmarks.recovery import Row, Run

from tests.engine_process import EngineProcess
from turnout.placement.real import DiskStore
from turnout.protocol.engine_requests import ASKED, FOLDER, EngineRequest
from turnout.train.model_zoo import resolve_checkpoint

EVERY_S, LATE_S, CALM_S, STOP_S = 5.0, 120.0, 600.0, (1.0, 8.0)
PHASES = {
    "GroupTrained": "publish",
    "VersionPublished": "prepare",
    "VersionPrepared": "activate",
    "VersionAttested": "activate",
    "VersionCommitted": "rollout",
    "StepTrained": "rollout",
    "RunStarted": "start",
}
WEIGHTS = {  # of kinds
    "prefill_sigkill": 2,
    "decode_sigkill": 2,
    "prefill_sigstop": 4,
    "decode_sigstop": 4,
    "external_sigkill": 2,
    "requests_aborted": 4,
    "engine_paused": 4,
    "controller_sigkill": 1,
    "controller_sigterm": 1,
}


@dataclass
class Story:
    """The run's events as they are written, and what they come to."""

    path: Path
    rows: list[Row] = field(default_factory=list[Row])
    _read: int = 0

    def look(self) -> list[Row]:
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._read)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read += len(whole)
            self.rows += [json.loads(line) for line in whole.splitlines()]
        return self.rows

    def phase(self) -> str:
        marks = (PHASES.get(row["event"]) for row in reversed(self.look()))
        return next((phase for phase in marks if phase is not None), "start")

    def engines(self, kind: str) -> dict[str, Row]:
        """The newest life of each engine of a worker type."""
        ready = [row for row in self.look() if row["event"] == "EngineReady" and row["worker_type"] == kind]
        return {row["engine"]: row for row in ready}

    def steps(self) -> int:
        return sum(row["event"] == "StepTrained" for row in self.look())

    def since(self, at: float, event: str, engine: str | None = None) -> Row | None:
        """The first such event after a time."""
        found = None
        for row in reversed(self.look()):
            if row["at"] < at:
                break
            if row["event"] == event and engine in (None, row.get("engine")):
                found = row
        return found


@dataclass
class Fault:
    """One fault; `engine` empty: not of one. `healed_s` None: not made up for yet."""

    kind: str
    phase: str
    at: float
    engine: str = ""
    healed_s: float | None = None

    def look(self, story: Story) -> None:
        if self.healed_s is not None:
            return
        after = self.at
        if self.kind.endswith("_sigkill") and self.engine:
            if (ready := story.since(after, "EngineReady", self.engine)) is None:
                return
            healed = story.since(ready["at"], "VersionAttested", self.engine)
        else:
            healed = story.since(after, "StepTrained")
        if healed is not None:
            self.healed_s = round(healed["at"] - self.at, 2)


class Outsider:
    """The engine of somebody else: always at one port, whatever process serves there."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lives = folder, 0
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.name = f"127.0.0.1:{self.port}"
        self._start()

    def _start(self) -> None:
        self._lives += 1
        work = self._folder / f"external-{self._lives}"
        work.mkdir()
        flags = ("--port", str(self.port), "--threads", "1", "--allowed-root", str(self._folder))
        self.process = EngineProcess(resolve_checkpoint("tiny:llama"), work, *flags)

    def replace(self) -> None:
        self.process.kill()
        self._start()

    def joins(self, run: Path, story: Story) -> None:
        """Has the run ask it, once in each life of the controller: commands are not remembered."""
        rows = story.look()
        last = max((at for at, row in enumerate(rows) if row["event"] == "RunStarted"), default=0)
        name = f"soak-{sum(row['event'] == 'RunStarted' for row in rows)}"
        begun = any(row["event"] == "GroupTaken" for row in rows[last:])
        known = any(row.get("engine") == self.name for row in rows[last:])
        if begun and not known and not list((run / FOLDER).glob(f"{name}.*")):
            request = EngineRequest("add", (self.name,))
            DiskStore().publish_file(run / FOLDER / f"{name}{ASKED}", request.encode())


class Trouble:
    """Draws faults, does them, and sees them made up for."""

    def __init__(self, run: Run, seed: int, outsider: Outsider) -> None:
        self._run, self._rng, self._outsider = run, random.Random(seed), outsider
        self.story, self.faults = Story(run.folder / "events.jsonl"), list[Fault]()
        self._later: list[tuple[float, Callable[[], None]]] = []

    def befall(self) -> None:
        kind = self._rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        fault = Fault(kind, self.story.phase(), time.time())
        if kind.startswith("controller"):
            self._controller(signal.SIGKILL if kind.endswith("kill") else signal.SIGTERM)
        elif kind.startswith("external"):
            fault.engine = self._outsider.name
            self._outsider.replace()
        else:
            half = kind.partition("_")[0]
            sides = (half,) if half in ("prefill", "decode") else ("prefill", "decode")
            engines = [row for side in sides for row in self.story.engines(side).values()]
            alive = [row for row in engines if Path(f"/proc/{row['pid']}").exists()]
            if not alive:
                return
            victim = self._rng.choice(alive)
            fault.engine = victim["engine"]
            self._engine(kind, victim)
        fault.at = time.time()
        self.faults.append(fault)

    def _controller(self, number: signal.Signals) -> None:
        self._run.process.send_signal(number)
        self._run.process.wait(60)
        self._run.start()

    def _engine(self, kind: str, victim: Row) -> None:
        seconds = self._rng.uniform(*STOP_S)
        if kind.endswith("sigkill"):
            os.kill(victim["pid"], signal.SIGKILL)
        elif kind.endswith("sigstop"):
            os.kill(victim["pid"], signal.SIGSTOP)
            self._later.append((time.time() + seconds, lambda: _signalled(victim["pid"])))
        elif kind == "requests_aborted":
            _asked(victim["url"], "/abort_request", {"abort_all": True, "rid": ""})
        else:
            _asked(victim["url"], "/pause_generation", {"mode": "retract"})
            go_on = lambda: _asked(victim["url"], "/continue_generation", {})  # noqa: E731
            self._later.append((time.time() + seconds, go_on))

    def look(self) -> None:
        now = time.time()
        self._outsider.joins(self._run.folder, self.story)
        for at, act in list(self._later):
            if now >= at:
                self._later.remove((at, act))
                act()
        for fault in self.faults:
            fault.look(self.story)


def _signalled(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return  # the run had given it up


def _asked(url: str, path: str, body: Row) -> None:
    """An engine that is gone, or does not answer, has other trouble."""
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.open(request, timeout=2).close()
    except (urllib.error.URLError, OSError):
        return


def words(folder: Path) -> tuple[str, ...]:
    sides = [{"worker_type": kind, "num_gpus": 2} for kind in ("prefill", "decode")]
    path = folder / "engines.json"
    path.write_text(json.dumps({"sglang": [{"name": "actor", "server_groups": sides}]}))
    engines = ("--sglang-config", str(path), "--use-fault-tolerance", "--min-engines", "2")
    again = ("--engine-restarts", "1000", "--engine-linger", "60")
    probes = ("--rollout-health-check-interval", "1", "--rollout-health-check-timeout", "2")
    return (*engines, *again, *probes, "--save-interval", "5", "--trainer-threads", "1", "--grace-s", "30")


def used(pid: int) -> Row:
    """Memory (MB) and open files of a process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return {}
    rss = next((int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS")), 0)
    return {"pid": pid, "rss_mb": rss, "files": files}


def lived(folder: Path, seconds: float, seed: int | None) -> tuple[Row, list[Fault]]:
    """One run for so long; `seed` None: without faults."""
    outsider = Outsider(folder)
    run = Run(folder / "run", *words(folder))
    trouble = Trouble(run, 0 if seed is None else seed, outsider)
    story, samples = trouble.story, list[Row]()
    run.wait("the first step", story.steps)
    begun, before = time.time(), story.steps()
    struck = begun
    try:
        while time.time() < begun + seconds:
            time.sleep(0.2)
            trouble.look()
            if time.time() - struck >= EVERY_S:
                struck = time.time()
                samples.append(used(run.process.pid))
                if seed is not None:
                    trouble.befall()
            if run.process.poll() is not None:
                said = run.said.read_text()[-2000:]
                raise SystemExit(f"the run ended with {run.process.returncode}: {run.folder}\n{said}")
        steps, end = story.steps() - before, time.time() + LATE_S
        while time.time() < end and any(fault.healed_s is None for fault in trouble.faults):
            time.sleep(0.2)
            trouble.look()
    finally:
        run.end()
        outsider.process.kill()
    summary = json.loads((run.folder / "summary.json").read_text())
    told = {"steps_per_minute": round(60 * steps / seconds, 1), "controller": flat(samples)}
    told |= {name: summary[name] for name in ("status", "groups", "audit", "incarnations")}
    return told, trouble.faults


def flat(samples: list[Row]) -> Row:
    """The controller that lived longest: memory and files in its first and its last third (medians)."""
    longest = Counter(row["pid"] for row in samples if row).most_common(1)[0][0]
    mine = [row for row in samples if row.get("pid") == longest]
    third = max(1, len(mine) // 3)
    parts = {"first": mine[:third], "last": mine[-third:]}
    made = {
        name: {key: median(row[key] for row in rows) for key in ("rss_mb", "files")}
        for name, rows in parts.items()
    }
    return {"samples": len(mine), **made}


def table(faults: list[Fault]) -> Row:
    made: Row = {}
    for kind in WEIGHTS:
        mine = [fault for fault in faults if fault.kind == kind]
        healed = [fault.healed_s for fault in mine if fault.healed_s is not None]
        made[kind] = {
            "count": len(mine),
            "phases": dict(Counter(fault.phase for fault in mine)),
            "healed": len(healed),
            "healed_median_s": median(healed) if healed else None,
            "healed_most_s": max(healed, default=None),
        }
    return made


def broken(row: Row) -> list[str]:
    """What the run promised and did not keep."""
    troubled, wrong = row["with_faults"], list[str]()
    if troubled["groups"]["lost"] or troubled["audit"]["failed"]:
        wrong.append(f"groups lost or the audit failed: {troubled['groups']}, {troubled['audit']}")
    if row["share_of_steps"] < 0.5:
        wrong.append(f"{row['share_of_steps']} of the steps of a run without faults")
    wrong += [
        f"{kind}: not all made up for" for kind, one in row["faults"].items() if one["healed"] < one["count"]
    ]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    row: dict[str, Any] = {"machine": describe(), "minutes": asked.minutes, "seed": asked.seed}
    with tempfile.TemporaryDirectory(prefix="turnout-soak-") as folder:
        for name, seconds, seed in (
            ("with_faults", 60 * asked.minutes, asked.seed),
            ("calm", min(30 * asked.minutes, CALM_S), None),
        ):
            place = Path(folder) / name
            place.mkdir()
            row[name], faults = lived(place, seconds, seed)
            row.setdefault("faults", table(faults))
    row["share_of_steps"] = round(row["with_faults"]["steps_per_minute"] / row["calm"]["steps_per_minute"], 2)
    row["broken"] = broken(row)
    asked.json.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(row, indent=1))
    return bool(row["broken"])


if __name__ == "__main__":
    raise SystemExit(main())
