"""Where threads of this process are: the frames of one, and a watch that tells where an event loop stands still.

A call that blocks the event loop (a reward that is `async` and sleeps, a lock on a file) stops all that would tell
of it, so that a thread has to. Promises: the watch's thread is a daemon, and ends with `stop`; it tells again and
again for as long as the loop stands still.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

FRAMES = 3
LOOK_S = 1.0


def where(thread: int | None) -> str:
    """The innermost frames of a thread (its `ident`), the innermost first; empty for one that is gone."""
    frame = sys._current_frames().get(-1 if thread is None else thread)
    if frame is None:
        return ""
    frames = traceback.extract_stack(frame)[-FRAMES:]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))


def threads_at(name: str) -> list[str]:
    """Where the threads are whose names begin so."""
    return [where(thread.ident) for thread in threading.enumerate() if thread.name.startswith(name)]


class LoopWatch:
    """Made on the event loop's thread. `stuck` is called on another, with where the loop stands and for how many
    seconds, once no `beat` came for `limit_s`."""

    def __init__(self, limit_s: float, stuck: Callable[[str, float], None]) -> None:
        self._limit_s, self._stuck = limit_s, stuck
        self._loop, self._at = threading.get_ident(), time.monotonic()
        self._over = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="loop-watch").start()

    def beat(self) -> None:
        self._at = time.monotonic()

    def stop(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            age = time.monotonic() - self._at
            if age > self._limit_s:
                self._stuck(where(self._loop), age)
