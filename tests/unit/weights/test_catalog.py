"""What a reader sees of a store: complete folders, the newest version, what is abandoned, late or gone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.weight_files import assets, model
from turnout.core.errors import VersionIncomplete, WeightError
from turnout.core.version import WeightVersion
from turnout.placement.real import DiskStore
from turnout.weights.catalog import StoreReader
from turnout.weights.depot import FolderDepot
from turnout.weights.lineage import Lineage
from turnout.weights.manifest import DONE, complete_versions
from turnout.weights.store import WeightStore
from turnout.weights.verify import verify, verify_store
from turnout.weights.visibility import Patience, visible_manifest


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    made = WeightStore(tmp_path / "w", DiskStore(), assets(tmp_path / "assets"), 200)
    made.open("run", 0, "b" * 32)
    return made


def reader(store: WeightStore) -> StoreReader:
    return StoreReader(FolderDepot(store.root, DiskStore()))


class Time:
    """A clock that only moves by waiting; `then` happens at the second wait."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.at, self.waits, self.then = 0.0, 0, then

    def sleep(self, seconds: float) -> None:
        self.at, self.waits = self.at + seconds, self.waits + 1
        if self.waits == 2:
            self.then()

    def patience(self) -> Patience:
        return Patience(5.0, lambda: self.at, self.sleep)


def test_a_look_at_a_store(store: WeightStore) -> None:
    versions = [store.publish(model(step), step).version for step in range(3)]
    (store.root / "weight_v000009.tmp-x").mkdir()
    (store.root / "weight_v000002" / DONE).unlink()
    found = reader(store).look()
    assert found.identity.run_id == "run" and found.identity.base_root == "b" * 32
    assert [m.version for m in found.usable()] == [versions[0], versions[2]]
    assert found.newest == versions[2] and sorted(found.records) == [1, 2, 3]
    assert found.folders == {"weight_v000001", "weight_v000002", "weight_v000003"}


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"run\.json is missing"):
        StoreReader(FolderDepot(tmp_path, DiskStore())).look()


@pytest.mark.parametrize("key", ["run.json", "PUBLISHED/000001.json", "INCARNATIONS/000000.json"])
@pytest.mark.parametrize("data", [b"{", b"[]", b"{}"])
def test_a_broken_record_is_named(store: WeightStore, key: str, data: bytes) -> None:
    store.publish(model(), 1)
    (store.root / key).write_bytes(data)
    with pytest.raises(WeightError, match=key):
        reader(store).look()


def test_a_folder_under_another_versions_name_is_no_version(store: WeightStore) -> None:
    """An older folder put in the place of a newer one has every checksum right."""
    store.publish(model(1), 1)
    shutil.copytree(store.root / "weight_v000001", store.root / "weight_v000002")
    assert [m.directory for m in reader(store).look().versions] == ["weight_v000001"]
    assert [m.directory for m in complete_versions(store.root)] == ["weight_v000001"]
    faults = {verdict.folder: verdict.fault for verdict in verify_store(store.root)}
    assert faults["weight_v000001"] == "" and "another version's folder" in faults["weight_v000002"]


def test_a_foreign_folder_is_not_the_published_one(store: WeightStore, tmp_path: Path) -> None:
    """The same number from another run, whole in itself, is not what the record names."""
    other = WeightStore(tmp_path / "other", DiskStore(), tmp_path / "assets", 200)
    other.open("other", 0, "b" * 32)
    other.publish(model(7), 1)
    folder = store.publish(model(1), 1).folder
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "other" / folder.name, folder)
    assert verify(folder)
    assert reader(store).look().usable() == []


def test_abandoned_versions_are_told_apart() -> None:
    lineage = Lineage({0: 0, 1: 10, 2: 12})
    old, mine = WeightVersion(0, 11, "a"), WeightVersion(1, 14, "b")
    assert lineage.abandoned(old) and lineage.abandoned(mine)
    assert not lineage.abandoned(WeightVersion(0, 10, "a"))
    assert not lineage.abandoned(WeightVersion(1, 12, "b"))
    newer = WeightVersion(2, 15, "c")
    assert lineage.newest([old, mine, newer]) == newer
    assert lineage.newest([old, mine]) is None
    assert Lineage({0: 0, 1: 11}).newest([old]) == old


def test_wgt_20_a_version_that_shows_late_is_waited_for(store: WeightStore) -> None:
    """Only the folder's DONE, or the whole folder, comes later."""
    published = store.publish(model(), 1)
    hidden = published.folder.rename(store.root / "hidden")
    time = Time(lambda: hidden.rename(published.folder))
    assert reader(store).await_version(published.version, time.patience()).newest == published.version
    assert time.waits == 2
    mark = (published.folder / DONE).rename(store.root / "mark")
    time = Time(lambda: mark.rename(published.folder / DONE))
    assert visible_manifest(published.folder, time.patience()).version == published.version
    assert time.waits == 2


def test_wgt_20_a_version_that_never_shows_ends_at_the_deadline(store: WeightStore) -> None:
    store.publish(model(), 1)
    time = Time()
    with pytest.raises(VersionIncomplete, match=r"v000004-.* does not show \(looked for 5 s"):
        reader(store).await_version(WeightVersion(0, 4, "0" * 32), time.patience())
    assert time.at == pytest.approx(5.0)


def test_what_was_removed_or_abandoned_is_told_at_once(store: WeightStore) -> None:
    first, last = (store.publish(model(step), step) for step in range(2))
    shutil.rmtree(first.folder)
    time = Time()
    with pytest.raises(WeightError, match="was removed"):
        reader(store).await_version(first.version, time.patience())
    row = {"incarnation": 1, "start": 1, "write_id": "w"}
    (store.root / "INCARNATIONS" / "000001.json").write_text(json.dumps(row))
    with pytest.raises(WeightError, match="was abandoned"):
        reader(store).await_version(last.version, time.patience())
    assert time.waits == 0


def test_damage_is_told_at_once(store: WeightStore) -> None:
    folder = store.publish(model(), 1).folder
    (folder / DONE).write_bytes(b"0" * 64)
    time = Time()
    with pytest.raises(WeightError, match="the checksum differs"):
        visible_manifest(folder, time.patience())
    assert time.waits == 0


def test_a_fetched_version_is_whole_or_refused(store: WeightStore, tmp_path: Path) -> None:
    published = store.publish(model(), 1)
    look = reader(store)
    manifest = look.look().versions[0]
    assert verify(look.fetch(manifest, tmp_path / "one")) == manifest
    shard = published.folder / "config.json"
    shard.write_bytes(shard.read_bytes().replace(b"toy", b"Toy"))
    with pytest.raises(WeightError, match=r"config\.json: the bytes are not those"):
        look.fetch(manifest, tmp_path / "two")
