"""Lines of a file that another process appends to: each is read once.

Owns no file: it is opened for each read, so that one which was replaced (metrics.jsonl on a resume) is noticed.
Promises: only whole lines; `read` takes at most about `limit` bytes.
"""

from __future__ import annotations

from pathlib import Path

BLOCK = 1 << 20


class Tail:
    """`offset` is where the next line begins, `size` what the file had at the last look."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.size = path, 0, 0
        self._file: tuple[int, int] | None = None

    @property
    def behind(self) -> bool:
        """Whether there may be more than `read` has given."""
        return self.offset < self.size

    def look(self) -> bool:
        """Whether the file is another one than at the last look, or shorter: then it is read from its beginning
        again."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            found = None
        known, self._file = self._file, None if found is None else (found.st_dev, found.st_ino)
        self.size = 0 if found is None else found.st_size
        anew = known is not None and (self._file != known or self.size < self.offset)
        if anew:
            self.offset = 0
        return anew

    def read(self, limit: int = BLOCK) -> list[tuple[int, bytes]]:
        """(place, line without its end) of the lines that were appended, after `look`."""
        if not self.behind:
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read(min(limit, self.size - self.offset))
            end = data.rfind(b"\n") + 1
            while not end and self.offset + len(data) < self.size:  # one line, longer than the limit
                more = file.read(limit)
                if not more:
                    break
                data += more
                end = data.rfind(b"\n") + 1
        if not end:
            self.size = self.offset  # torn: until it grows
            return []
        lines: list[tuple[int, bytes]] = []
        at = self.offset
        for line in data[: end - 1].split(b"\n"):
            lines.append((at, line))
            at += len(line) + 1
        self.offset += end
        return lines
