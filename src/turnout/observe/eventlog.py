"""events.jsonl: the one record of what happened in a run, written by one writer and read by the audit.

Owns the file. Promises: an event is in the log if and only if its line has its newline; each is handed to the
operating system before `emit` returns; a second writer is refused; a torn last line (the writer was killed in
the middle) is cut off by the next writer and skipped, but told, by a reader.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from turnout.core.errors import ConfigError, DataError, Fault, InvariantBroken
from turnout.core.events import Event, from_json, to_json
from turnout.core.ports import Clock
from turnout.observe.append import append_line

log = logging.getLogger(__name__)
_text = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


class EventLog:
    """The writer. `size` is the length of the file in bytes, `torn_bytes` what was cut off when it was opened."""

    def __init__(self, path: Path, clock: Clock, take_over: bool = False) -> None:
        """Opens `path` for appending; raises ConfigError where another process writes it. `take_over`: whoever
        writes it has lost the run (the ledger has another owner), and goes on with a file that nobody reads."""
        self._path, self._clock = path, clock
        self.told: Callable[[Event], None] = lambda _: None  # called with each event, after it is in the log
        self._file = path.open("ab", buffering=0)
        if not self._locked() and take_over:
            self._file.close()
            log.warning("%s is held by a process of an earlier incarnation: it is left behind", path)
            own = path.with_name(f".{path.name}.{os.getpid()}")
            shutil.copyfile(path, own)
            own.replace(path)
            self._file = path.open("ab", buffering=0)
        if not self._locked():
            self._file.close()
            reason = "another run writes it"
            raise ConfigError(Fault(str(path), "", reason, "give each run its own --run-dir"))
        self.size, self.torn_bytes = cut_torn_end(path)
        if self.torn_bytes:
            log.warning("%s: cut off %d bytes of an event that was never finished", path, self.torn_bytes)

    def _locked(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def sync(self) -> None:
        """What was written is on stable storage after this."""
        os.fsync(self._file.fileno())

    def emit(self, event: Event) -> None:
        """Appends one event. Raises InvariantBroken where it holds something that JSON doesn't have (NaN),
        LedgerError where the file can't be written."""
        try:
            text = _text(to_json(event, self._clock.wall()))
        except (TypeError, ValueError) as error:
            raise InvariantBroken(f"event {type(event).__name__} can't be written: {error}") from None
        self.size = append_line(self._file, self._path, text.encode() + b"\n")
        self.told(event)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_events(path: Path, torn: Callable[[str], None] | None = None) -> Iterator[tuple[float, Event]]:
    """Yields (wall seconds, event) in order. A torn last line ends the reading and is told to `torn`, which logs
    a warning by default; any other bad line raises DataError with its number."""
    tell = torn if torn is not None else log.warning
    with path.open("rb") as file:  # binary: lines end with \n only, whatever else the texts hold
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                tell(f"{path}:{number}: the last event is torn ({len(line)} bytes)")
                return
            yield _parse(line, path, number)


def _parse(line: bytes, path: Path, number: int) -> tuple[float, Event]:
    try:
        row = cast("dict[str, Any]", json.loads(line))
        return float(row["at"]), from_json(row)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"no event: {type(error).__name__}: {error}"
        shown = line[:60].decode(errors="replace").strip()
        raise DataError(Fault(f"{path}:{number}", shown, reason, "was the file edited?")) from None


def cut_torn_end(path: Path) -> tuple[int, int]:
    """Cuts the file after its last newline; (bytes kept, bytes cut)."""
    size = path.stat().st_size
    end = size
    with path.open("rb") as file:
        while end:
            start = max(0, end - 65536)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
    if end < size:
        os.truncate(path, end)
    return end, size - end
