"""Which processes are engines that a controller left; tests/process/test_engines_kept.py takes real ones over."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from turnout.placement.real import RealClock
from turnout.serving.left_behind import end_left_behind


def child(ready: Path, *words: str) -> subprocess.Popen[bytes]:
    """A process with a command line of an engine, or nearly, in a group of its own."""
    code = "import time; time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code, *words, str(ready)], start_new_session=True)
    ready.write_text(json.dumps({"pid": process.pid, "url": "http://127.0.0.1:1"}))
    return process


def engine(folder: Path, name: str) -> subprocess.Popen[bytes]:
    """`python -m turnout.engine` of another folder of modules: it only sleeps."""
    place = folder / "modules" / "turnout" / "engine"
    place.mkdir(parents=True, exist_ok=True)
    for package in (place.parent, place):
        (package / "__init__.py").touch()
    (place / "__main__.py").write_text("import time; time.sleep(60)")
    ready = folder / f"{name}.ready.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "turnout.engine", "--ready-file", str(ready)],
        cwd=place.parents[1],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        start_new_session=True,
    )
    ready.write_text(json.dumps({"pid": process.pid, "url": "http://127.0.0.1:1"}))
    return process


def test_engines_are_known_by_their_ids_and_no_other_process_is_touched(tmp_path: Path) -> None:
    wanted, other = engine(tmp_path, "actor.decode1-0"), engine(tmp_path, "actor.decode1-1")
    stranger = child(tmp_path / "engine-7.ready.json", "turnout.engine")
    try:
        asyncio.run(end_left_behind(tmp_path, RealClock(), frozenset({"actor.decode1-0"})))
        assert wanted.poll() is None and stranger.poll() is None
        assert other.wait(10) < 0
    finally:
        for process in (wanted, other, stranger):
            process.kill()
            process.wait()
