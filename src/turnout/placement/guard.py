"""Runs a program that starts processes of its own, and leaves nothing of it behind:
`python -m turnout.placement.guard --parent-pid N --temporary FOLDER -- COMMAND ...`.

For servers of others, whose processes may leave their group, outlive their parent, and leave sockets and shared
memory. Promises: when the command ends, when this process is told to stop (SIGTERM), or when the parent is no
longer N, every process that descends from the command is killed; then the temporary folder (TMPDIR of the command)
is removed, and segments of SGLang in /dev/shm that one of these processes had mapped when last looked at: every 5 s
and before anything is killed. The exit status is the command's, 128 + n where
signal n ended it. Standard library only. It needs /proc to see descendants; without it only the command is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

POLL_S = 0.2
POLLS_PER_SCAN = 25  # the maps of a big server are thousands of lines
KILL_DEADLINE_S = 15.0
TRACKER_GRACE_S = 5.0
PR_SET_CHILD_SUBREAPER = 36
SEGMENTS = ("sglang_", "sgl_shm_")  # SGLang 0.5.23: load reports, shared arrays


class Guard:
    """One command and all that comes of it."""

    def __init__(self, command: list[str], parent: int, temporary: Path) -> None:
        self._parent, self._temporary = parent, temporary
        self._told = False
        self._segments: set[Path] = set()
        signal.signal(signal.SIGTERM, lambda *_: self._tell())
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the command become our children
        environment = {**os.environ, "TMPDIR": str(temporary)}
        self._child = subprocess.Popen(command, env=environment)

    def run(self) -> int:
        """Waits for one of the three ends, cleans up, returns the exit status."""
        polls = 0
        while self._child.poll() is None and not self._told and os.getppid() == self._parent:
            if polls % POLLS_PER_SCAN == 0:
                self._scan()
            polls += 1
            time.sleep(POLL_S)
        self._scan()
        self._kill()
        for path in self._segments:
            path.unlink(missing_ok=True)
        shutil.rmtree(self._temporary, ignore_errors=True)
        code = self._child.wait()
        return code if code >= 0 else 128 - code

    def _tell(self) -> None:
        self._told = True

    def _scan(self) -> None:
        for pid in descendants(os.getpid()):
            self._segments |= segments_of(pid)

    def _kill(self) -> None:
        """Kills until nothing is left: a process may have started another one just before it died. Python's
        resource trackers remove named semaphores once all others are dead: they get a moment for that."""
        start = time.monotonic()
        while time.monotonic() - start < KILL_DEADLINE_S:
            living = descendants(os.getpid())
            if self._child.poll() is None:
                living.add(self._child.pid)
            spared = time.monotonic() - start < TRACKER_GRACE_S
            for pid in living if not spared else {p for p in living if not is_tracker(p)}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            if not living:
                return
            time.sleep(0.02)

    def _reap(self) -> None:
        if self._child.poll() is None:
            return  # waiting for any process now could take its status away
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0] > 0:
                pass


def descendants(root: int) -> set[int]:
    """Processes that live and descend from `root`; empty where there is no /proc."""
    parents = dict(_parents())
    found: set[int] = set()
    layer = {root}
    while layer:
        layer = {pid for pid, parent in parents.items() if parent in layer and pid not in found}
        found |= layer
    return found


def segments_of(pid: int) -> set[Path]:
    """Files of SGLang in /dev/shm that a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    paths = {Path(line[line.index("/dev/shm/") :]) for line in lines if "/dev/shm/" in line}  # noqa: S108
    return {path for path in paths if path.name.startswith(SEGMENTS) and "(deleted)" not in path.name}


def is_tracker(pid: int) -> bool:
    """Whether a process is the resource tracker of Python's multiprocessing."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _parents() -> Iterator[tuple[int, int]]:
    """(process, its parent) of every process that lives; zombies are left out."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                yield int(path.parent.name), int(parent)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="turnout.placement.guard")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--temporary", type=Path, required=True)
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(words)
    return Guard(given.command, given.parent_pid, given.temporary).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
