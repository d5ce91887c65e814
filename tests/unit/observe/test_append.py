"""A line is appended as a whole, or not at all."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from turnout.core.errors import LedgerError
from turnout.observe.append import append_line


class Full:
    """A disk that takes three more bytes, and is full."""

    def __init__(self, file: Any) -> None:
        self._file, self.fileno, self._left = file, file.fileno, 3

    def write(self, data: memoryview) -> int:
        if not self._left:
            raise OSError(errno.ENOSPC, "No space left on device")
        part, self._left = data[: self._left], 0
        return self._file.write(part)


def test_what_a_full_disk_took_of_a_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("ab", buffering=0) as file:
        assert append_line(file, path, b"one\n") == 4
        with pytest.raises(LedgerError, match=r"log can't be written: .*No space left"):
            append_line(Full(file), path, b"never seen\n")
        assert append_line(file, path, b"two\n") == 8
    assert path.read_bytes() == b"one\ntwo\n"
