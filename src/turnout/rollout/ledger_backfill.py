"""Moves the ledger's write-ahead log into its file on a thread of its own.

SQLite does that in the writer's commit, where the two syncs would hold the event loop for as long as the disk takes
(a quarter of a second for 16 MB on a cloud disk). A passive checkpoint on another connection blocks nobody
(https://sqlite.org/c3ref/wal_checkpoint_v2.html). Where it can't keep up, the writer still does it itself at
WAL_PAGES pages, so the log has a limit. Only for files: a ledger in memory, as the simulator's, has no log.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from pathlib import Path

log = logging.getLogger(__name__)
EVERY_S = 0.5
LEAST_BYTES = 2 << 20
STOP_S = 30.0


class Backfill:
    """The thread. It never writes anything but what the log holds."""

    def __init__(self, path: Path) -> None:
        self._path, self._log = path, path.with_name(f"{path.name}-wal")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="ledger-backfill", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(STOP_S)

    def _work(self) -> None:
        connection = sqlite3.connect(self._path, isolation_level=None, timeout=0)
        try:
            while not self._stop.wait(EVERY_S):
                if self._log.exists() and self._log.stat().st_size > LEAST_BYTES:
                    connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as error:
            log.warning("%s: the writer moves its own log from now on: %s", self._path, error)
        finally:
            connection.close()
