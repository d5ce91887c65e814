"""A shared-memory segment that any torch process of this host can read as a tensor's storage.

The form is torch's: a header whose first number counts users, then the data. The count begins so high that no
living reader removes the segment (torch's manager does so when a reader's process ends): it belongs to its maker.
Promises: the memory is taken when the segment is made (a full /dev/shm is a WeightError, not a crash); `close`, and
the end of its maker, remove the name whatever readers do; what a killed process left behind goes with the next
`sweep` (turnout.placement.shared_memory).
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref

import numpy as np
from numpy.typing import NDArray

from turnout.core.errors import WeightError
from turnout.placement.shared_memory import FOLDER, new_path

HEADER_BYTES = 64
USERS = 1 << 30


class Segment:
    """`data` [size] uint8 is the memory, `handle` the name that readers open."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._path = new_path()
        try:
            file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except OSError as fault:
            raise WeightError(f"no shared memory can be made in {FOLDER}: {fault}") from fault
        try:
            os.posix_fallocate(file, 0, HEADER_BYTES + size)
            memory = mmap.mmap(file, HEADER_BYTES + size)
        except OSError as fault:
            self._path.unlink()
            raise WeightError(f"{size} bytes of shared memory in {FOLDER}: {fault}") from fault
        finally:
            os.close(file)
        self._end = weakref.finalize(self, self._path.unlink, missing_ok=True)
        memory[:4] = struct.pack("=i", USERS)
        self.data: NDArray[np.uint8] = np.frombuffer(memory, np.uint8, size, HEADER_BYTES)

    @property
    def handle(self) -> bytes:
        return f"/{self._path.name}".encode()

    @property
    def named(self) -> bool:
        """Whether readers still find it."""
        return self._path.exists()

    def close(self) -> None:
        """Removes the name and this process's view; readers that have it open keep their own."""
        self.data = np.empty(0, np.uint8)
        self._end()
