"""Where the files of a store lie: in a folder or an object store, behind the same few calls.

Keys are paths relative to the root of the store, with "/" between their parts. Promises: a key that can be read has
its whole content; of all who create a key once, one is told that it has, also where the answer to its write was
lost; every call ends within its deadline, and raises WeightError, naming depot and key, where it fails.
Calls block.

What a reader may rely on: all files of a version's folder but DONE are complete once DONE is there, and no file of
a version ever changes; a folder can be removed (turnout.weights.retention) while somebody reads it, which then
fails. A follower writes one key, followers/<id>.json, and is the only one who does.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from turnout.core.errors import WeightError
from turnout.core.ports import Store


class Depot(Protocol):
    """`name` is the path or URL that a person gave."""

    name: str

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Bytes by key of everything below a folder ("": the whole depot), in the order of the keys, without what
        is still being written or removed."""
        ...

    def read(self, key: str) -> bytes | None:
        """A small file's content; None where there is none."""
        ...

    def create_once(self, key: str, data: bytes) -> bool:
        """Whether the key is there with this very content, which no other writer has (it carries a write id);
        False where it is another's."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Writes or replaces a small file of which one process is the owner."""
        ...

    def fetch_file(self, key: str, target: Path) -> None:
        """Writes the key's content to a local file, which is not synced; raises WeightError where there is no
        such key."""
        ...


class FolderDepot:
    """A depot in a folder of a POSIX file system. A slow disk is the only thing that it waits for."""

    def __init__(self, root: Path, files: Store) -> None:
        self.root, self._files = root, files
        self.name = str(root)

    def sizes(self, folder: str = "") -> dict[str, int]:
        found: dict[str, int] = {}
        with self._told(folder):
            for place, folders, names in os.walk(self.root / folder):
                folders[:] = [name for name in folders if not _unfinished(name)]
                for path in (Path(place, name) for name in names if not _unfinished(name)):
                    try:
                        found[path.relative_to(self.root).as_posix()] = path.stat().st_size
                    except FileNotFoundError:
                        continue  # removed since it was listed
        return dict(sorted(found.items()))

    def read(self, key: str) -> bytes | None:
        with self._told(key):
            try:
                return self._files.read(self.root / key)
            except FileNotFoundError:
                return None

    def create_once(self, key: str, data: bytes) -> bool:
        with self._told(key):
            try:
                if self._files.create_once(self.root / key, data):
                    return True
            except OSError as fault:
                # The link may be there and its answer lost, as with a server of NFS that went and came back.
                found = self.read(key)
                if found is None:
                    raise fault from None
                return found == data
            return self.read(key) == data

    def put(self, key: str, data: bytes) -> None:
        with self._told(key):
            self._files.publish_file(self.root / key, data)

    def fetch_file(self, key: str, target: Path) -> None:
        with self._told(key):
            shutil.copyfile(self.root / key, target)

    @contextmanager
    def _told(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as fault:
            raise WeightError(f"{self.root / key}: {fault}") from fault


def _unfinished(name: str) -> bool:
    return ".tmp-" in name or name.startswith(".removed-")
