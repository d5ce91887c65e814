"""The guard of foreign servers: whatever ends it, no process, folder or segment of the command is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

DEADLINE_S = 30.0

# A command as bad as SGLang may be: a child that leaves the group and outlives its parent, a mapped segment.
COMMAND = """
import mmap, multiprocessing, os, subprocess, sys, time
lock = multiprocessing.get_context("spawn").Lock()
note, segment, then = sys.argv[1:]
with open(segment, "wb") as made:
    made.write(bytes(4096))
with open(segment, "r+b") as made:
    mapped = mmap.mmap(made.fileno(), 4096)
deep = "import os, time; os.setsid(); open(%r, 'w').write(str(os.getpid())); time.sleep(600)" % (note + ".new")
middle = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {deep!r}])"
subprocess.run([sys.executable, "-c", middle])
open(os.path.join(os.environ["TMPDIR"], "socket"), "w").close()
while not os.path.exists(note + ".new"):
    time.sleep(0.02)
print(lock._semlock.name, file=open(note + ".lock", "w"), flush=True)
os.rename(note + ".new", note)
time.sleep(0.5)  # the guard looks at segments every few seconds, first at the start
if then == "end":
    sys.exit(3)
if then == "die":
    os.kill(os.getpid(), 9)
time.sleep(600)
"""


@pytest.fixture
def segment():
    path = Path(f"/dev/shm/sglang_loads_{uuid.uuid4().hex}.shm")
    yield path
    path.unlink(missing_ok=True)


def until(true) -> None:
    end = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.02)


def guarded(folder: Path, segment: Path, then: str, parent: int) -> list[str]:
    (folder / "temporary").mkdir()
    return [
        *(sys.executable, "-m", "turnout.placement.guard", "--parent-pid", str(parent)),
        *("--temporary", str(folder / "temporary"), "--", sys.executable, "-c", COMMAND),
        *(str(folder / "note"), str(segment), then),
    ]


def nothing_left(folder: Path, segment: Path) -> None:
    pid = int((folder / "note").read_text())
    assert not Path(f"/proc/{pid}").exists()
    assert not (folder / "temporary").exists()
    assert not segment.exists()
    assert not semaphore(folder).exists()


def semaphore(folder: Path) -> Path:
    return Path("/dev/shm/sem." + (folder / "note.lock").read_text().strip().lstrip("/"))


def test_told_to_stop(tmp_path, segment):
    process = subprocess.Popen(guarded(tmp_path, segment, "stay", os.getpid()))
    until((tmp_path / "note").exists)
    assert semaphore(tmp_path).exists()
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.wait(DEADLINE_S)
    nothing_left(tmp_path, segment)


@pytest.mark.parametrize(("then", "status"), [("end", 3), ("die", 137)])
def test_the_command_ends_by_itself(tmp_path, segment, then, status):
    process = subprocess.run(guarded(tmp_path, segment, then, os.getpid()), timeout=DEADLINE_S, check=False)
    assert process.returncode == status
    pid = int((tmp_path / "note").read_text())
    assert not Path(f"/proc/{pid}").exists() and not (tmp_path / "temporary").exists()


def test_the_parent_is_killed(tmp_path, segment):
    code = "import os, subprocess, sys; subprocess.call([*sys.argv[1:5], str(os.getpid()), *sys.argv[6:]])"
    words = guarded(tmp_path, segment, "stay", 0)
    assert words[3] == "--parent-pid"
    parent = subprocess.Popen([sys.executable, "-c", code, *words])
    until((tmp_path / "note").exists)
    parent.kill()
    parent.wait(DEADLINE_S)
    until(lambda: not (tmp_path / "temporary").exists())
    nothing_left(tmp_path, segment)
