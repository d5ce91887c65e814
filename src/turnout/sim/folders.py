"""Where the disks of virtual worlds are: in memory, where there is such a place."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from turnout.rollout.ledger_owner import process_lives

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of our own is made in it
PREFIX = "turnout-sim-"


def in_memory() -> Path | None:
    """A place for files that go with this machine's next start."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else None


@contextlib.contextmanager
def folder_of_worlds() -> Iterator[Path]:
    """A folder for the disks of many worlds, gone afterwards with whatever killed processes left in it. What a
    killed owner left goes with the next one's."""
    base = Path(tempfile.gettempdir()) if (memory := in_memory()) is None else memory
    for left in base.glob(f"{PREFIX}all-*"):
        if not process_lives(int(left.name.rpartition("-")[2])):
            shutil.rmtree(left, ignore_errors=True)
    folder = base / f"{PREFIX}all-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
