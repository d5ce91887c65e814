"""Names in shared memory: each tells its maker's process, so that what a killed one left behind can be removed.

A file in it is memory that any process of this host reads by its path. Promises: one is written in full or not at
all; a full /dev/shm is an OSError of its maker, not a crash of a reader.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

FOLDER = Path("/dev/shm")  # noqa: S108 - where shm_open keeps names on Linux
_NAME = re.compile(r"turnout_(\d+)_[0-9a-f]+")


def new_path() -> Path:
    """A name that nobody has, of this process."""
    return FOLDER / f"turnout_{os.getpid()}_{secrets.token_hex(8)}"


def new_file(data: bytes = b"") -> Path:
    """A file of this user's alone with this content. Who makes it removes it. Raises OSError."""
    path = new_path()
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(file, "wb", buffering=0) as out:
            rest = memoryview(data)
            while rest:
                rest = rest[out.write(rest) or 0 :]
    except OSError:
        path.unlink()
        raise
    return path


def sweep() -> list[str]:
    """Removes what belongs to processes that are gone; returns the names."""
    gone = []
    for path in sorted(FOLDER.glob("turnout_*")):
        match = _NAME.fullmatch(path.name)
        if match is None or Path(f"/proc/{match.group(1)}").exists():
            continue
        with contextlib.suppress(FileNotFoundError, PermissionError):  # another sweep, another user
            path.unlink()
            gone.append(path.name)
    return gone
