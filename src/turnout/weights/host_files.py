"""Durable files of one host: each method is one step that a kill can come before, between or after.

Owns nothing. Promises: what `sync`, `sync_path` and `flush` return from is on stable storage; `rename` is atomic.
Tests put their own in its place, which stops at a chosen step and forgets what was not synced.
"""

from __future__ import annotations

import mmap
import os
import shutil
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from turnout.weights.changes import Bits, Change, overwrite
from turnout.weights.digest import Sums, element_sums


class HostFiles:
    """The real ones. Every method raises OSError as the file system does."""

    def create(self, path: Path) -> BinaryIO:
        """A new empty file to `append` to; the caller closes it."""
        return path.open("wb", buffering=0)

    def append(self, file: BinaryIO, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]

    def sync(self, file: BinaryIO) -> None:
        os.fsync(file.fileno())

    def sync_path(self, path: Path) -> None:
        """A file, or a folder's names."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def remove(self, path: Path) -> None:
        """A file or a folder with all in it; nothing where there is none."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def map(self, path: Path) -> NDArray[np.uint8]:
        """The file's bytes, written through; an empty file has no map."""
        if path.stat().st_size == 0:
            return np.zeros(0, np.uint8)
        with path.open("r+b") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)

    def scatter(self, target: Bits, change: Change) -> Sums:
        """See turnout.weights.changes.overwrite."""
        return overwrite(target, change)

    def fill(self, target: Bits, bits: Bits) -> Sums:
        """A whole tensor; returns the sums of what then stands there."""
        target[:] = bits
        return element_sums(target)

    def flush(self, path: Path, mapped: NDArray[np.uint8]) -> None:
        """Brings what was written through a map to stable storage."""
        base = mapped.base
        if isinstance(base, mmap.mmap):
            base.flush()
        self.sync_path(path)

    def write(self, path: Path, data: bytes) -> None:
        """A whole small file, atomically."""
        staged = path.with_name(f".{path.name}.new")
        with self.create(staged) as file:
            self.append(file, data)
            self.sync(file)
        self.rename(staged, path)
        self.sync_path(path.parent)
