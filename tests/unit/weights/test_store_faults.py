"""Faults of a store with real processes, signals and a real full disk: an old trainer that is continued after its
successor has published, and a small tmpfs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.weights.test_store import BASE, SHARD, names
from tests.weight_files import as_rows, assets, host, model
from turnout.core.errors import WeightError
from turnout.placement.real import DiskStore
from turnout.weights.catalog import StoreReader
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.depot import FolderDepot
from turnout.weights.digest import root_of
from turnout.weights.store import WeightStore
from turnout.weights.verify import verify, verify_store

_TRAINER = """
import os, signal, sys
from pathlib import Path
from tests.weight_files import model
from turnout.core.errors import WeightError
from turnout.core.version import WeightVersion
from turnout.placement.real import DiskStore
from turnout.weights.store import WeightStore

root, stop_at = Path(sys.argv[1]), sys.argv[2]


class Stops(DiskStore):
    armed = False

    def stop(self, at):
        if self.armed and at == stop_at:
            self.armed = False
            os.kill(os.getpid(), signal.SIGSTOP)

    def publish_folder(self, staged, final):
        self.stop("rename")
        super().publish_folder(staged, final)
        self.stop("renamed")

    def create_once(self, path, data):
        self.stop("record")
        return super().create_once(path, data)

    def remove_tree(self, path):
        self.stop("remove")
        super().remove_tree(path)


def export():
    yield from model(2)
    files.stop("export")


files = Stops()
store = WeightStore(root, files, root.parent / "assets", 200)
store.open("run", 0, "b" * 32)
for step in (0, 1):
    store.retain(store.publish(model(step), step).version, 0.0)
files.armed = True
try:
    made = store.publish(export(), 2).version
    store.retain(made, 1.0)
    files.armed = False
    store.publish(model(3), 3)
except WeightError as fault:
    print(fault, flush=True)
    sys.exit(WeightError.exit_status)
"""


def stopped_trainer(root: Path, at: str) -> subprocess.Popen[str]:
    """A trainer of incarnation 0 that has two versions committed and stopped itself in the third."""
    process = subprocess.Popen(
        [sys.executable, "-c", _TRAINER, str(root), at],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TURNOUT_NATIVE": "0"},
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), process.communicate()
    return process


@pytest.mark.parametrize("at", ["export", "rename", "renamed", "record", "remove"])
def test_an_old_trainer_that_is_continued_does_no_harm(at: str, tmp_path: Path) -> None:
    """Wherever it was stopped; its successor goes on from version 2 meanwhile."""
    assets(tmp_path / "assets")
    root = tmp_path / "w"
    old = stopped_trainer(root, at)
    try:
        heir = WeightStore(root, DiskStore(), tmp_path / "assets", SHARD)
        heir.open("run", 1, BASE, start=2)
        mine = [heir.publish(model(step), step).version for step in (5, 6)]
        os.kill(old.pid, signal.SIGCONT)
        out, err = old.communicate(timeout=60)
        assert old.returncode == WeightError.exit_status, err
        assert "has taken over" in out or "No such file" in out or "not empty" in out, out
    finally:
        old.kill()
    found = StoreReader(FolderDepot(root, DiskStore())).look()
    assert found.newest == mine[-1]
    for version, step in zip(mine, (5, 6)):
        folder = root / version.directory
        assert verify(folder).version == version
        assert as_rows(read_checkpoint(folder)) == as_rows(model(step))
    usable = {m.version.counter: m.version.root for m in found.usable()}
    if at == "remove":  # a removal that was decided on before: never of what a resume goes on from
        usable.setdefault(1, root_of(model(0)))
    assert usable == {1: root_of(model(0)), 2: root_of(model(1))} | {v.counter: v.root for v in mine}
    for version in mine:
        heir.retain(version, 0.0)
    assert {int(name[8:]) for name in names(root) if "_v" in name} == {v.counter for v in mine}
    assert heir.publish(model(7), 7).version.counter == mine[-1].counter + 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here; the faults of test_store.py inject ENOSPC instead")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_fills_in_the_middle_of_a_version(small_disk: Path, tmp_path: Path) -> None:
    """The check of free space knows only the last version's size; this one is larger than the disk."""
    store = WeightStore(small_disk / "w", DiskStore(), assets(tmp_path / "assets"), 1 << 18)
    store.open("run", 0, BASE)
    store.publish(model(1), 1)
    before = {path: path.read_bytes() for path in (small_disk / "w").rglob("*") if path.is_file()}
    large = [host(f"w{n}", "F32", (256, 128), n) for n in range(10)]
    with pytest.raises(WeightError, match=r"no version could be written: .*No space left"):
        store.publish(large, 2)
    assert {path: path.read_bytes() for path in (small_disk / "w").rglob("*") if path.is_file()} == before
    assert store.publish(model(2), 3).version.counter == 2
    assert {verdict.fault for verdict in verify_store(small_disk / "w")} == {""}


def test_below_two_versions_worth_nothing_is_begun(small_disk: Path, tmp_path: Path) -> None:
    store = WeightStore(small_disk / "w", DiskStore(), assets(tmp_path / "assets"), 1 << 18)
    store.open("run", 0, BASE)
    half = [host(f"w{n}", "F32", (256, 128), n) for n in range(3)]  # 384 KB
    store.publish(half, 1)
    with pytest.raises(WeightError, match=r"version 2 is not written: .* bytes free"):
        store.publish(half, 2)
    assert [name for name in names(small_disk / "w") if "_v" in name] == ["weight_v000001"]
