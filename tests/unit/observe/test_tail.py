"""Lines of a growing file, each once; a torn end waits; a replaced file is read anew."""

from __future__ import annotations

from pathlib import Path

from turnout.observe.tail import Tail


def test_each_line_once_and_a_torn_one_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    assert tail.look() is False and tail.read() == []
    path.write_bytes(b"a\nbb\nc")
    assert tail.look() is False
    assert tail.read() == [(0, b"a"), (2, b"bb")] and tail.read() == []
    with path.open("ab") as file:
        file.write(b"c\n")
    tail.look()
    assert tail.read() == [(5, b"cc")] and not tail.behind


def test_a_line_longer_than_the_limit_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100 + b"\ny\n")
    tail = Tail(path)
    tail.look()
    assert tail.read(limit=8) + tail.read(limit=8) == [(0, b"x" * 100), (101, b"y")]


def test_a_replaced_or_shorter_file_is_told_and_read_from_its_beginning(tmp_path: Path) -> None:
    path, other = tmp_path / "log", tmp_path / "new"
    path.write_bytes(b"a\nb\n")
    tail = Tail(path)
    tail.look()
    tail.read()
    other.write_bytes(b"c\nd\ne\n")
    other.replace(path)
    assert tail.look() is True and len(tail.read()) == 3
    path.write_bytes(b"f\n")
    assert tail.look() is True and tail.read() == [(0, b"f")]
