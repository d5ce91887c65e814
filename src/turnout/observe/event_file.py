"""A file of scalars for TensorBoard: TFRecords of `Event` messages (tensorflow/core/util/event.proto), made here.
tensorboardX writes the same, and imports torch where it can, which a run need not load.

Promise: what was flushed is read by TensorBoard, whatever becomes of the process.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

VERSION = b"brain.Event:2"
LARGEST = 3.4028234663852886e38  # float32's
ODD = re.compile(r"[^-/\w.]")  # what a tag may not hold: TensorBoard makes folders of tags


class EventFile:
    """One file in `folder`, which exists. Raises OSError as files do."""

    def __init__(self, folder: Path) -> None:
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._write(_field(3, VERSION))

    def begins_at(self, step: int) -> None:
        """What other files of the folder hold of this step and later ones is taken back."""
        started = _field(7, b"\x08\x01")
        self._write(_step(step) + started)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Finite numbers by name."""
        rows = (_value(name, number) for name, number in values.items())
        self._write(_step(step) + _field(5, b"".join(_field(1, row) for row in rows)))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, rest: bytes) -> None:
        """One event with the time of now."""
        event = b"\x09" + struct.pack("<d", time.time()) + rest
        size = struct.pack("<Q", len(event))
        self._file.write(size + _checksum(size) + event + _checksum(event))


def _step(step: int) -> bytes:
    return b"\x10" + _varint(step)


def _value(name: str, number: float) -> bytes:
    tag = _field(1, ODD.sub("_", name).lstrip("/").encode())
    return tag + b"\x15" + struct.pack("<f", min(max(number, -LARGEST), LARGEST))


def _field(number: int, data: bytes) -> bytes:
    """A field of protobuf with a length."""
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _table() -> list[int]:
    rows = []
    for row in range(256):
        for _ in range(8):
            row = row >> 1 ^ (0x82F63B78 if row & 1 else 0)  # noqa: PLW2901 - CRC-32C
        rows.append(row)
    return rows


TABLE = _table()


def _checksum(data: bytes) -> bytes:
    """TFRecord's: CRC-32C, turned and moved."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF)
