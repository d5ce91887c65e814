"""The virtual disk: the real store over a folder in memory, with full disks, torn writes and lost answers.

Owns the folder and what a kill leaves of it. Promises: nothing is synced, since a process that is killed loses
nothing that it wrote; a kill in the middle of a write leaves half of it; after a kill the next life gets a copy as
it was at that instant, so that whatever the dead one's `finally` blocks still do reaches nobody.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

from turnout.placement.real import DiskStore
from turnout.sim.faults import Faults
from turnout.sim.loop import Killed


class VirtualDisk(DiskStore):
    """One controller's view of the folder `root`. `kill` ends its life, and returns where that comes too late."""

    def __init__(
        self, root: Path, faults: Faults, now: Callable[[], float], kill: Callable[[], None]
    ) -> None:
        self.root, self._faults, self._now, self._kill = root, faults, now, kill
        self._full_until = 0.0
        self._made = 0

    def create_once(self, path: Path, data: bytes) -> bool:
        made = super().create_once(path, data)
        if made and self._faults.hit("file_answer_lost", 0.02, "disk"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return made

    def publish_folder(self, staged: Path, final: Path) -> None:
        self._room(final)
        files = sorted(path for path in staged.rglob("*") if path.is_file())
        if files and self._faults.hit("torn_write", 0.02, "disk"):
            last = files[-1]
            last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
            self._end()
        super().publish_folder(staged, final)
        if self._faults.hit("torn_write", 0.02, "disk"):
            self._end()

    def free_bytes(self, path: Path) -> int:
        del path
        return 0 if self._now() < self._full_until else 1 << 40

    def _aside(self, path: Path) -> Path:
        """A kill can come between the renaming and the end."""
        doomed = super()._aside(path)
        if self._faults.hit("torn_write", 0.01, "disk"):
            self._end()
        return doomed

    def _sync(self, path: Path) -> None:
        """A process that is killed loses nothing that it wrote."""

    def _room(self, path: Path) -> None:
        """Raises OSError while the disk is full."""
        if self._faults.calm:
            self._full_until = 0.0
        elif self._now() >= self._full_until and self._faults.hit("full_disk", 0.01, "disk"):
            self._full_until = self._now() + self._faults.uniform(0.0, 20.0)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        if self._now() < self._full_until:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def _staged(self, path: Path, data: bytes) -> Path:
        self._room(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._made += 1
        staged = path.with_name(f".{path.name}.tmp-{self._made}")
        if self._faults.hit("torn_write", 0.005, "disk"):
            staged.write_bytes(data[: len(data) // 2])
            self._end()
        staged.write_bytes(data)
        return staged

    def _end(self) -> None:
        self._kill()
        raise Killed("killed in the middle of a write")


def after_kill(root: Path, target: Path) -> Path:
    """The folder as the next life finds it. Locks of the dead process are gone with it."""
    shutil.copytree(root, target, symlinks=True, copy_function=shutil.copyfile)
    return target
