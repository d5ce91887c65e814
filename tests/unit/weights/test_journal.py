"""The redo log: what is written comes back, and a log that is not whole is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.published import deltas, first, moved
from turnout.core.errors import WeightError
from turnout.core.version import WeightVersion
from turnout.weights.host_files import HostFiles
from turnout.weights.journal import LogHead, Redo, read_log, redo_of, sync_log, write_log

TARGET = WeightVersion(1, 7, "b" * 32)


def written(path: Path) -> tuple[LogHead, list[Redo]]:
    before = first()
    changes = [d for d in deltas(before, moved(before, 4)) if d.change.count]
    redos = [redo_of(d.change, d.base, d.after) for d in changes]
    head = LogHead("a" * 32, TARGET, 12, len(redos))
    write_log(HostFiles(), path, head, redos)
    sync_log(HostFiles(), path)
    return head, redos


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    head, redos = written(tmp_path / "log")
    found, records = read_log(tmp_path / "log")
    assert found == head
    for redo, back in zip(redos, records, strict=True):
        assert (back.name, back.dtype, back.shape, back.after) == (
            redo.name,
            redo.dtype,
            redo.shape,
            redo.after,
        )
        assert np.array_equal(back.bits, redo.bits)
        assert (back.positions is None) == (redo.positions is None)
        assert redo.positions is None or np.array_equal(back.positions, redo.positions)
    assert {redo.positions is None for redo in redos} == {True, False}  # both kinds were in it


def test_every_cut_and_every_flipped_bit_is_found(tmp_path: Path) -> None:
    written(tmp_path / "log")
    data = (tmp_path / "log").read_bytes()
    for size in range(0, len(data), 7):
        (tmp_path / "log").write_bytes(data[:size])
        with pytest.raises(WeightError):
            read_log(tmp_path / "log")
    for at in range(0, len(data), 5):
        (tmp_path / "log").write_bytes(data[:at] + bytes([data[at] ^ 8]) + data[at + 1 :])
        with pytest.raises(WeightError):
            read_log(tmp_path / "log")


def test_a_log_is_no_larger_than_the_tensors(tmp_path: Path) -> None:
    """Where all elements change their positions would be most of the log: then the whole tensor is logged."""
    before = first()
    changes = deltas(before, moved(before, 5, share=1.0))
    redos = [redo_of(d.change, d.base, d.after) for d in changes if d.change.count]
    write_log(HostFiles(), tmp_path / "log", LogHead("a" * 32, TARGET, 0, len(redos)), redos)
    assert (tmp_path / "log").stat().st_size <= sum(t.nbytes for t in before) + 400 * (len(redos) + 1)
