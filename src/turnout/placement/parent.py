"""A process that must not outlive the one that it belongs to, or only for a while.

PR_SET_PDEATHSIG follows the *thread* that started the process: spawn from a thread that stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time

from turnout.placement.processes import handle_lives

PR_SET_PDEATHSIG = 1
PARENT_POLL_S = 0.5


def die_with(parent: int) -> None:
    """Ends this process when its parent ends: by the kernel's signal on Linux, and by looking."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="turnout-parent-watch", daemon=True).start()


class Owner:
    """Who this process belongs to. It ends `linger_s` after its owner has, unless another process adopts it before;
    0: with its owner, which nobody can take over. `pid` 0: it belongs to nobody, and stays."""

    def __init__(self, pid: int, linger_s: float = 0.0) -> None:
        self.linger_s = linger_s
        self._handle: int | None = None
        if pid and linger_s:
            with contextlib.suppress(ProcessLookupError):  # gone already: the time begins
                self._handle = os.pidfd_open(pid)
            if os.getppid() != pid:  # gone as well, and its number may be another process's
                self._handle = None
            threading.Thread(target=self._watch, name="turnout-owner-watch", daemon=True).start()
        elif pid:
            die_with(pid)

    def adopt(self, pid: int) -> None:
        """From now on this process belongs to that one; raises ProcessLookupError where there is none."""
        self._handle = os.pidfd_open(pid)  # the one before stays open: the watch may be looking at it

    def _watch(self) -> None:
        gone = 0.0  # since when there is no owner
        while not gone or time.monotonic() - gone < self.linger_s:
            time.sleep(min(PARENT_POLL_S, self.linger_s))
            gone = 0.0 if handle_lives(self._handle) else gone or time.monotonic()
        os._exit(1)
