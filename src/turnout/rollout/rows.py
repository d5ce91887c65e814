"""Rows of a prompt file, JSONL or Parquet, or of a data set (turnout.rollout.datasets), each with its place for
error messages.

Promises: a JSONL file is split on the line feed only (a carriage return before it is dropped; U+2028, U+2029
and U+0085 are ordinary characters); a byte order mark is skipped, blank lines are no rows, a last line needs
no line feed. Values have the type that the file gives them; nothing is inferred over rows. A row that is no
JSON object or no UTF-8 becomes a BadRow; the other rows are still read, so that all faults are told at once.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from turnout.core.errors import DataError, Fault
from turnout.rollout.datasets import hub_table, is_hub, saved_table

SHOWN_CHARACTERS = 80
SHOWN_FAULTS = 20
SHOWN_ALIKE = 3
_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """A good row: its index among the rows of the file (from 0), its place as path:line, its first characters,
    and its values."""

    index: int
    where: str
    shown: str
    values: dict[str, Any]


@dataclass(frozen=True)
class BadRow:
    where: str
    shown: str
    reason: str
    remedy: str = ""

    def fault(self) -> Fault:
        return Fault(self.where, self.shown, self.reason, self.remedy)


def refuse(bad: list[BadRow]) -> NoReturn:
    """Raises DataError with the first faults (few where all are of one kind) and how many more there are."""
    alike = len({row.reason for row in bad}) == 1
    shown = bad[: SHOWN_ALIKE if alike else SHOWN_FAULTS]
    faults = [row.fault() for row in shown]
    if len(bad) > len(shown):
        faults.append(Fault("", "", f"and {len(bad) - len(shown)} more bad rows"))
    raise DataError(faults)


def split_path(text: str) -> tuple[str, slice]:
    """The path and the rows wanted of it: `data.jsonl@[10:20]` takes rows 10 to 19, as Python slices do."""
    match = _SLICE.fullmatch(text)
    if match is None:
        if re.search(r"@\[.*\]$", text):
            reason = "is no slice of rows"
            raise DataError(Fault("prompt data", text, reason, "write path@[start:stop], such as @[0:100]"))
        return text, slice(None)
    start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
    return match["path"], slice(start, stop)


def read_rows(text: str, columns: tuple[str, ...] | None) -> tuple[list[Row], list[BadRow]]:
    """The rows of `path` or `path@[a:b]`. Only `columns` are read of a Parquet file (None: all)."""
    name, wanted = split_path(text)
    if is_hub(name):
        return _picked(name, hub_table(name, columns), wanted)
    path = Path(name).expanduser()
    if path.is_dir():
        return _picked(str(path), saved_table(path, columns), wanted)
    if not path.is_file():
        raise DataError(Fault("prompt data", str(path), "no such file", "give a .jsonl or .parquet file"))
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        return _read_jsonl(path, wanted)
    if path.suffix == ".parquet":
        return _read_parquet(path, wanted, columns)
    reason = f"files that end in {path.suffix!r} are not read"
    raise DataError(Fault("prompt data", str(path), reason, "give a .jsonl or .parquet file"))


def shown(text: str) -> str:
    """The first characters of a row, with everything escaped that could break a terminal line."""
    cut = text[:SHOWN_CHARACTERS]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)


def _read_jsonl(path: Path, wanted: slice) -> tuple[list[Row], list[BadRow]]:
    lines: list[tuple[int, bytes]] = []
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if line.strip():
                lines.append((number, line.rstrip(b"\r\n")))
    if not lines:
        raise DataError(Fault("prompt data", str(path), "the file holds no row", "give a file with rows"))
    good: list[Row] = []
    bad: list[BadRow] = []
    for index in range(*wanted.indices(len(lines))):
        number, line = lines[index]
        row = _parsed(index, f"{path}:{number}", line)
        if isinstance(row, Row):
            good.append(row)
        else:
            bad.append(row)
    return good, bad


def _parsed(index: int, where: str, line: bytes) -> Row | BadRow:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as fault:
        reason = f"byte {fault.start + 1} of the line is not UTF-8: {fault.reason}"
        head = shown(line[: 4 * SHOWN_CHARACTERS].decode("utf-8", "backslashreplace"))
        return BadRow(where, head, reason, "save the file as UTF-8")
    try:
        values = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as fault:
        return BadRow(where, shown(text), f"is not JSON: {fault.msg} at character {fault.pos + 1}")
    except (ValueError, RecursionError) as fault:
        return BadRow(where, shown(text), f"is not JSON that can be read: {fault}")
    if not isinstance(values, dict):
        return BadRow(where, shown(text), "is JSON, but no object", "write one object per line")
    if "\\ud" in text.lower() and (half := _lone_surrogate(values)) is not None:
        reason = (
            f"holds {half}, half of a surrogate pair: that is no character and could not be written again"
        )
        return BadRow(where, shown(text), reason, "write the whole character, or U+FFFD in its place")
    return Row(index, where, shown(text), values)


def _lone_surrogate(values: dict[str, Any]) -> str | None:
    try:
        json.dumps(values, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as fault:
        return ascii(fault.object[fault.start])
    return None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _read_parquet(
    path: Path, wanted: slice, columns: tuple[str, ...] | None
) -> tuple[list[Row], list[BadRow]]:
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        file = pq.ParquetFile(path)
        present = [name for name in file.schema_arrow.names if columns is None or name in columns]
        table = file.read(columns=present)
    except (pa.ArrowException, OSError) as fault:
        raise DataError(Fault("prompt data", str(path), f"is no readable Parquet file: {fault}")) from fault
    return _picked(str(path), table, wanted)


def _picked(where: str, table: Any, wanted: slice) -> tuple[list[Row], list[BadRow]]:
    """The rows of an Arrow table that are wanted."""
    if table.num_rows == 0:
        raise DataError(Fault("prompt data", where, "the file holds no row", "give a file with rows"))
    picked = range(*wanted.indices(table.num_rows))
    rows = table.slice(picked.start, len(picked)).to_pylist()
    return [Row(i, f"{where}:{i + 1}", shown(repr(v)), v) for i, v in zip(picked, rows)], []
