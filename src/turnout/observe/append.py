"""Lines at the end of a file: each is there as a whole, or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from turnout.core.errors import LedgerError


def append_line(file: Any, path: Path, line: bytes) -> int:
    """Appends to an unbuffered file that was opened to append; its size then. Raises LedgerError where it can't be
    written (a full disk), and cuts off what there is of the line: another one may follow when there is room."""
    size, rest = os.fstat(file.fileno()).st_size, memoryview(line)
    try:
        while rest:  # an unbuffered write may take a part only
            rest = rest[file.write(rest) :]
    except OSError as error:
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), size)
        raise LedgerError(f"{path} can't be written: {error}") from None
    return size + len(line)
