"""The virtual disk: the Store port, and what a kill, a full disk and a lost answer leave behind."""

from __future__ import annotations

import random

import pytest

from turnout.core.errors import ConfigError
from turnout.sim.disk import VirtualDisk, after_kill
from turnout.sim.faults import KINDS, Faults, parse_kinds
from turnout.sim.loop import Killed


def disk(tmp_path, kind=None):
    """A disk on which every operation meets the one kind of fault."""
    faults = Faults(random.Random(0), () if kind is None else (kind,))
    faults.rates = dict.fromkeys(faults.rates, 1e9)
    kills = []
    return VirtualDisk(tmp_path, faults, lambda: 0.0, lambda: kills.append(1)), faults, kills


def test_files_are_whole_and_created_once(tmp_path):
    files, _, _ = disk(tmp_path)
    files.publish_file(tmp_path / "a", b"one")
    files.publish_file(tmp_path / "a", b"two")
    assert files.read(tmp_path / "a") == b"two"
    assert files.create_once(tmp_path / "folder" / "b", b"mine")
    assert not files.create_once(tmp_path / "folder" / "b", b"other")
    assert files.names(tmp_path / "folder") == ["b"] and files.names(tmp_path / "none") == []


def test_a_folder_appears_under_its_name_and_goes(tmp_path):
    files, _, _ = disk(tmp_path)
    staged = tmp_path / "staged"
    staged.mkdir()
    (staged / "x").write_bytes(b"x")
    files.publish_folder(staged, tmp_path / "final")
    assert files.names(tmp_path) == ["final"]
    files.remove_tree(tmp_path / "final")
    assert files.names(tmp_path) == []


def test_a_kill_in_a_write_leaves_half_of_it_beside_its_place(tmp_path):
    files, faults, kills = disk(tmp_path, "torn_write")
    with pytest.raises(Killed):
        files.publish_file(tmp_path / "a", b"12345678")
    (left,) = files.names(tmp_path)
    assert left.startswith(".a.tmp-") and files.read(tmp_path / left) == b"1234"
    assert len(kills) == 1 and faults.counts["torn_write"] == 1


def test_a_folder_that_a_kill_tore_never_got_its_name(tmp_path):
    files, _, _ = disk(tmp_path, "torn_write")
    staged = tmp_path / "staged"
    staged.mkdir()
    (staged / "x").write_bytes(b"1234")
    with pytest.raises(Killed):
        files.publish_folder(staged, tmp_path / "final")
    assert files.names(tmp_path) == ["staged"] and (staged / "x").read_bytes() == b"12"


def test_a_full_disk_takes_nothing_until_all_is_calm(tmp_path):
    files, faults, _ = disk(tmp_path, "full_disk")
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            files.publish_file(tmp_path / "a", b"x")
    assert faults.counts["full_disk"] == 1 and files.free_bytes(tmp_path) == 0
    faults.calm = True
    files.publish_file(tmp_path / "a", b"x")


def test_an_answer_is_lost_though_the_file_is_there(tmp_path):
    files, _, _ = disk(tmp_path, "file_answer_lost")
    with pytest.raises(OSError, match="Input/output"):
        files.create_once(tmp_path / "a", b"mine")
    assert files.read(tmp_path / "a") == b"mine"


def test_what_the_dead_still_write_reaches_nobody(tmp_path):
    old = tmp_path / "old"
    old.mkdir()
    (old / "a").write_bytes(b"before")
    new = after_kill(old, tmp_path / "new")
    (old / "a").write_bytes(b"after")
    assert (new / "a").read_bytes() == b"before"


def test_kinds_of_faults_are_named():
    assert parse_kinds("all") == tuple(KINDS) and parse_kinds("none") == ()
    assert parse_kinds("partition,full_disk") == ("partition", "full_disk")
    with pytest.raises(ConfigError, match="meteor"):
        parse_kinds("partition,meteor")


def test_a_kind_that_was_not_asked_for_never_happens():
    faults = Faults(random.Random(1), ("partition",))
    faults.rates["partition"] = 1.0
    assert not any(faults.hit("full_disk", 1e9, "disk") for _ in range(100))
    assert faults.hit("partition", 1e9, "e0")
    assert dict(faults.counts) == {"partition": 1}
