"""The redo log of one delta that is about to be applied in place: absolute values, so that replay needs no base.

    bytes 0..16   head length, data length: little-endian, 8 bytes each     } one frame; the first one's head is
    32 bytes      blake3 of head and data                                   } that of the log, then `records` frames
    head          JSON                                                      } follow, one per changed tensor
    data          positions (int32 or int64) then bit patterns; only patterns, of all elements, where that is less

Promises: after `write_log` and `sync_log` all of it is on stable storage; `read_log` gives a whole log, or raises.
A log is never larger than the tensors that it changes, plus a few hundred bytes for each.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from turnout.core.errors import WeightError
from turnout.core.version import WeightVersion
from turnout.weights.changes import Bits, Change, position_type
from turnout.weights.host_files import HostFiles
from turnout.weights.tensors import ITEM_BYTES, UNSIGNED

FORMAT, FORMAT_VERSION = "turnout-redo", 1
HEAD_BYTES_MAX = 1 << 20
_FRAME = 16 + 32


@dataclass(frozen=True)
class LogHead:
    """From which root to which version, and how many tensors change."""

    base: str
    target: WeightVersion
    step: int
    records: int


@dataclass(frozen=True)
class Redo:
    """One tensor's new values. `positions` None: `bits` are all of its elements. `after` is its digest then."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    after: str
    positions: np.ndarray[Any, Any] | None
    bits: Bits

    @property
    def change(self) -> Change:
        assert self.positions is not None, "a whole tensor is no change of some elements"
        return Change(self.name, self.dtype, self.shape, self.positions, self.bits)


def redo_of(change: Change, now: Bits, after: str) -> Redo:
    """What to log of a change to a tensor with the bits `now` [elements]: its positions and values, or the whole
    tensor where that is fewer bytes."""
    head = (change.name, change.dtype, change.shape, after)
    if change.positions.nbytes + change.bits.nbytes < now.nbytes:
        return Redo(*head, change.positions, change.bits)
    whole = np.array(now)
    whole[change.positions] = change.bits
    return Redo(*head, None, whole)


def write_log(files: HostFiles, path: Path, head: LogHead, records: Iterable[Redo]) -> None:
    """Writes the log, not yet synced; an OSError or what `records` raises passes through."""
    with files.create(path) as file:
        first = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(head)}
        _append(files, file, first, [])
        for redo in records:
            sparse = redo.positions is not None
            row = {"name": redo.name, "dtype": redo.dtype, "shape": redo.shape, "after": redo.after}
            row["count"] = redo.bits.size if sparse else None
            parts = [redo.positions, redo.bits] if redo.positions is not None else [redo.bits]
            _append(files, file, row, [np.ascontiguousarray(p).view(np.uint8) for p in parts])


def sync_log(files: HostFiles, path: Path) -> None:
    """Brings a written log and its name to stable storage."""
    files.sync_path(path)
    files.sync_path(path.parent)


def read_log(path: Path) -> tuple[LogHead, Iterator[Redo]]:
    """Head and records, made one at a time, after every checksum was compared; raises WeightError for a log that
    is not whole, OSError where there is none."""
    data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
    frames = _frames(path, data)
    try:
        row, _ = next(frames)
        if (row.pop("format"), row.pop("format_version")) != (FORMAT, FORMAT_VERSION):
            raise WeightError(f"{path}: not a redo log of a format known here")
        row["target"] = WeightVersion(**row["target"])
        head = LogHead(**row)
        rows = list(frames)
    except (StopIteration, KeyError, TypeError, ValueError) as fault:
        raise WeightError(f"{path}: not a redo log: {fault}") from fault
    if len(rows) != head.records:
        raise WeightError(f"{path}: {len(rows)} records of {head.records}")
    return head, (_record(row, body) for row, body in rows)


def _append(files: HostFiles, file: Any, head: dict[str, Any], parts: list[np.ndarray[Any, Any]]) -> None:
    text = json.dumps(head).encode()
    sum_ = blake3(text)
    for part in parts:
        sum_.update(part.data)
    sizes = len(text).to_bytes(8, "little") + sum(p.size for p in parts).to_bytes(8, "little")
    files.append(file, sizes + sum_.digest() + text)
    for part in parts:
        files.append(file, part.data)


def _frames(path: Path, data: np.ndarray[Any, Any]) -> Iterator[tuple[dict[str, Any], np.ndarray[Any, Any]]]:
    at = 0
    while at < data.size:
        begin = at + _FRAME
        head = int.from_bytes(data[at : at + 8].tobytes(), "little")
        end = begin + head + int.from_bytes(data[at + 8 : at + 16].tobytes(), "little")
        if begin > data.size or head > HEAD_BYTES_MAX or end > data.size:
            raise WeightError(f"{path}: ends within a record")
        if blake3(data[begin:end].data).digest() != data[at + 16 : begin].tobytes():
            raise WeightError(f"{path}: a record at byte {at} is not what was written")
        yield json.loads(data[begin : begin + head].tobytes()), data[begin + head : end]
        at = end


def _record(row: dict[str, Any], body: np.ndarray[Any, Any]) -> Redo:
    shape, width = tuple(row["shape"]), ITEM_BYTES[row["dtype"]]
    head = (row["name"], row["dtype"], shape, row["after"])
    if row["count"] is None:
        return Redo(*head, None, np.frombuffer(body.tobytes(), UNSIGNED[width]))
    kind = np.dtype(position_type(int(np.prod(shape, dtype=np.int64))))
    split = row["count"] * kind.itemsize
    positions = np.frombuffer(body[:split].tobytes(), kind)
    return Redo(*head, positions, np.frombuffer(body[split:].tobytes(), UNSIGNED[width]))
