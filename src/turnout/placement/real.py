"""The real clock and the real store behind the ports of turnout.core.ports."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from turnout.core.errors import DeadlineExceeded

T = TypeVar("T")


class RealClock:
    """Wall and monotonic time of this host; waits on the running asyncio loop."""

    wall = staticmethod(time.time)
    now = staticmethod(time.monotonic)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def within(self, seconds: float, what: str, work: Awaitable[T]) -> T:
        """The result of `work`; raises DeadlineExceeded(what) after `seconds`, with `work` cancelled."""
        scope = asyncio.timeout(seconds)
        try:
            async with scope:
                return await work
        except TimeoutError:
            if scope.expired():
                raise DeadlineExceeded(what, seconds) from None
            raise


class DiskStore:
    """Files of this host. Every publishing call syncs the bytes, then the name."""

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def names(self, folder: Path) -> list[str]:
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def publish_file(self, path: Path, data: bytes) -> None:
        staged = self._staged(path, data)
        staged.replace(path)
        self._sync(path.parent)

    def create_once(self, path: Path, data: bytes) -> bool:
        """A hard link of a synced file: atomic, and refused by the file system where the name exists."""
        staged = self._staged(path, data)
        try:
            os.link(staged, path)
        except FileExistsError:
            return False
        finally:
            staged.unlink()
        self._sync(path.parent)
        return True

    def publish_folder(self, staged: Path, final: Path) -> None:
        for path in sorted(staged.iterdir()):
            self._sync(path)
        self._sync(staged)
        staged.rename(final)
        self._sync(final.parent)

    def remove_tree(self, path: Path) -> None:
        """A folder or a file; renamed out of the way first, so that no reader meets half of it."""
        doomed = self._aside(path)
        if doomed.is_dir():
            shutil.rmtree(doomed)
        else:
            doomed.unlink()

    def free_bytes(self, path: Path) -> int:
        return shutil.disk_usage(path).free

    def _aside(self, path: Path) -> Path:
        """What `remove_tree` is about to delete, under the name that it has then."""
        if path.name.startswith(".removed-"):
            return path
        return path.rename(path.with_name(f".removed-{path.name}-{os.getpid()}"))

    def _staged(self, path: Path, data: bytes) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(f".{path.name}.tmp-{os.getpid()}-{time.monotonic_ns()}")
        try:
            with staged.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            staged.unlink(missing_ok=True)
            raise
        return staged

    def _sync(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
