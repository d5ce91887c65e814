"""A process that must not outlive the one that started it.

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
