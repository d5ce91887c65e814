"""Running `turnout` as a user does, as a process, and looking for what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny.yaml"
DEADLINE_S = 180.0


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TURNOUT_DEBUG": "0", **extra}


def start(*words: str, cwd: Path = ROOT, **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "turnout.cli.main", *words],
        cwd=cwd,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str], deadline_s: float = DEADLINE_S) -> tuple[int, str, str]:
    """(exit status, stdout, stderr)."""
    try:
        out, err = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after {deadline_s} s:\n{out[-2000:]}\n{err[-2000:]}") from None
    return process.returncode, out, err


def train(run_dir: Path, *words: str, **extra: str) -> tuple[int, str, str]:
    """`turnout train examples/tiny.yaml` with these options, to its end."""
    return ended(
        start("train", str(TINY), "--run-dir", str(run_dir), "--engine-threads", "1", *words, **extra)
    )


def events(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "events.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n") if line.endswith("}")]


def of_kind(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in events(run_dir) if row["event"] == kind]


def wait_for(what: str, found: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    """Polls until `found()` is true; fails when the process ends before or after DEADLINE_S."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        value = found()
        if value:
            return value
        if process.poll() is not None:
            out, err = process.communicate()
            raise AssertionError(
                f"ended with {process.returncode} before {what}:\n{out[-2000:]}\n{err[-2000:]}"
            )
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"no {what} within {DEADLINE_S} s")


def processes_of(run_dir: Path) -> list[str]:
    """Command lines of live processes that name the run's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if str(run_dir) in line and state != "Z":
                found.append(line)
    return found


def ranks_of(folder: Path) -> dict[int, int]:
    """Processes of the trainer by rank."""
    found = {}
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        words = line.read_bytes().decode(errors="replace").split("\0") if line.exists() else []
        if "turnout.train.rank" in words and str(folder / "trainer") in words:
            found[int(words[words.index("--rank") + 1])] = int(line.parent.name)
    return found


def gone_within(run_dir: Path, seconds: float) -> list[str]:
    """What is still there of a run after at most so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and processes_of(run_dir):
        time.sleep(0.05)
    return processes_of(run_dir)


def whole(run_dir: Path, status: int, err: str) -> dict[str, Any]:
    """The summary of a run that ended well, with nothing lost or left behind."""
    assert status == 0, err
    assert gone_within(run_dir, 5) == []
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["audit"]["failed"] == 0, summary["audit"]
    assert summary["groups"]["lost"] == 0
    return summary
