"""A store copied to a real S3 server over HTTP: whole, refused or told; and read back bit by bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.object_store import AnswerLoser, environment, s3_server
from tests.unit.weights.test_store import BASE, SHARD, delta_of
from tests.weight_files import assets, model
from turnout.core.errors import WeightError
from turnout.placement.real import DiskStore
from turnout.weights.catalog import StoreReader
from turnout.weights.manifest import DONE
from turnout.weights.mirror import CLAIM, Mirror
from turnout.weights.object_depot import ObjectDepot, is_url
from turnout.weights.retention import FollowerWatch
from turnout.weights.store import WeightStore
from turnout.weights.verify import verify

URL = "s3://weights/runs/one"
FOREIGN = "foreign"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def url(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A prefix of its own for each test."""
    for name, value in environment(server).items():
        monkeypatch.setenv(name, value)
    assets(tmp_path / "assets")
    return f"{URL}/{tmp_path.name}"


def opened(tmp_path: Path, url: str, name: str = "w", incarnation: int = 0, start: int = 0) -> WeightStore:
    store = WeightStore(tmp_path / name, DiskStore(), tmp_path / "assets", SHARD)
    store.mirror = Mirror(ObjectDepot(url))
    store.open(name if name == FOREIGN else "run", incarnation, BASE, start)
    return store


def test_urls_are_told_from_paths() -> None:
    assert is_url("s3://bucket/a") and is_url("gs://bucket") and is_url("az://account/b")
    assert not is_url("/a/b") and not is_url("s3") and not is_url("file:///a")


def test_the_calls_of_a_depot(url: str, tmp_path: Path) -> None:
    depot = ObjectDepot(url)
    assert depot.sizes() == {} and depot.read("a/b") is None
    assert depot.create_once("a/b", b"one") and not depot.create_once("a/b", b"two")
    assert depot.create_once("a/b", b"one"), "the very same content is this writer's own"
    depot.put("a/c", b"x")
    depot.put("a/c", b"xy")
    big = tmp_path / "big"
    big.write_bytes(bytes(range(256)) * 50_000)  # beyond one part of an upload
    depot.put_file("d/big", big)
    depot.fetch_file("d/big", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == big.read_bytes()
    assert depot.sizes() == {"a/b": 3, "a/c": 2, "d/big": 12_800_000}
    assert depot.sizes("a") == {"a/b": 3, "a/c": 2}
    with pytest.raises(WeightError, match=f"{url}/d/none"):
        depot.fetch_file("d/none", tmp_path / "none")
    depot.delete(["a/b", "a/gone"])
    assert list(depot.sizes()) == ["a/c", "d/big"]


def test_a_server_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WeightError, match=r"s3://weights/runs/one/run\.json: .*retries"):
        ObjectDepot(URL).read("run.json")


def test_every_version_is_copied_and_comes_back_bit_by_bit(url: str, tmp_path: Path) -> None:
    store = opened(tmp_path, url)
    first = store.publish(model(1), 1)
    second = delta_of(store, first.version, model(1), model(2))
    store.publish_anchor(model(2), second.version, 2)
    recorded = store.record("0" * 32)
    reader = StoreReader(ObjectDepot(url))
    found = reader.look()
    assert found.identity.run_id == "run" and found.newest == recorded
    assert [m.directory for m in found.usable()] == ["weight_v000001", "anchor_v000002", "weight_v000002"]
    for manifest in found.usable():
        fetched = reader.fetch(manifest, tmp_path / "back" / manifest.directory)
        assert verify(fetched) == manifest == verify(tmp_path / "w" / manifest.directory)
        here = {path.name: path.read_bytes() for path in (tmp_path / "w" / manifest.directory).iterdir()}
        assert {path.name: path.read_bytes() for path in fetched.iterdir()} == here


def test_a_version_without_done_or_with_a_missing_file_is_none(url: str, tmp_path: Path) -> None:
    store = opened(tmp_path, url)
    for step in range(3):
        store.publish(model(step), step)
    depot = ObjectDepot(url)
    depot.delete([f"weight_v000001/{DONE}", "weight_v000002/config.json"])
    assert [m.directory for m in StoreReader(depot).look().usable()] == ["weight_v000003"]


def test_an_upload_that_broke_off_is_made_good_by_the_next(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path, url)
    real = ObjectDepot.put_file

    def breaks(self: ObjectDepot, key: str, source: Path) -> None:
        if key.endswith("manifest.json"):
            raise WeightError(f"{key}: the connection broke")
        real(self, key, source)

    monkeypatch.setattr(ObjectDepot, "put_file", breaks)
    with pytest.raises(WeightError, match="the connection broke"):
        store.publish(model(1), 1)
    reader = StoreReader(ObjectDepot(url))
    assert reader.look().versions == [] and reader.look().newest is None
    monkeypatch.undo()
    for name, value in environment("").items():
        monkeypatch.setenv(name, value)
    assert store.publish(model(2), 2).version.counter == 2
    assert [m.version.counter for m in reader.look().usable()] == [1, 2]


def test_of_two_publishers_of_one_number_one_is_refused(url: str, tmp_path: Path) -> None:
    """Two runs' directories, one URL, the same run id: each numbers from its own folder."""
    one, two = opened(tmp_path, url), opened(tmp_path, url, "other")
    one.publish(model(1), 1)
    with pytest.raises(WeightError, match=r"weight_v000001|version 1 was published by somebody else"):
        two.publish(model(2), 1)
    reader = StoreReader(ObjectDepot(url))
    manifest = reader.look().usable()[0]
    verify(reader.fetch(manifest, tmp_path / "back"))


def test_a_folder_that_another_publisher_claimed_is_left_alone(url: str, tmp_path: Path) -> None:
    store, depot = opened(tmp_path, url), ObjectDepot(url)
    assert depot.create_once(f"weight_v000001/{CLAIM}", b"another")
    with pytest.raises(WeightError, match="is being written by somebody else"):
        store.publish(model(1), 1)
    assert list(depot.sizes("weight_v000001")) == [f"weight_v000001/{CLAIM}"]


def test_another_run_and_an_older_incarnation_are_refused(url: str, tmp_path: Path) -> None:
    old = opened(tmp_path, url)
    old.publish(model(1), 1)
    with pytest.raises(WeightError, match="belongs to run run"):
        opened(tmp_path, url, FOREIGN)
    heir = opened(tmp_path, url, "heir", incarnation=1, start=1)
    assert heir.publish(model(2), 2).version.counter == 2, "numbers go on from the copy's highest"
    before = ObjectDepot(url).sizes()
    with pytest.raises(WeightError, match="incarnation 1 of this run has taken over"):
        old.publish(model(3), 2)  # its own folder does not know of the heir, who runs on another host
    assert ObjectDepot(url).sizes() == before


def test_retention_of_the_copy_looks_at_its_own_followers(url: str, tmp_path: Path) -> None:
    store, depot = opened(tmp_path, url), ObjectDepot(url)
    store.followers = FollowerWatch(10.0)
    first = store.publish(model(0), 0).version
    store.retain(first, 0.0)
    versions = [first]
    for step in (1, 2, 3):
        versions.append(delta_of(store, versions[-1], model(step - 1), model(step)).version)
        store.publish_anchor(model(step), versions[-1], step)
        at = versions[1]
        depot.put(
            "followers/far.json", json.dumps({"counter": 2, "root": at.root, "incarnation": 0}).encode()
        )
        store.retain(versions[-1], float(step))

    def left() -> list[str]:
        return sorted({key.split("/")[0] for key in depot.sizes() if "_v" in key})

    anchors = ["anchor_v000003", "anchor_v000004"]
    assert left() == [*anchors, "weight_v000003", "weight_v000004"]
    assert sorted(path.name for path in (tmp_path / "w").glob("*_v*")) == anchors
    store.retain(versions[-1], 20.0)
    assert left() == anchors
    depot.put_file(f"weight_v000002/{CLAIM}", tmp_path / "assets" / "config.json")
    store.retain(versions[-1], 21.0)
    assert left() == anchors, "what a killed publisher left goes as well"


def test_a_lost_answer_of_a_conditional_put(
    url: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server creates the record, its answer never comes, the client tries again and is told that it exists."""
    store = opened(tmp_path, url)
    proxy = AnswerLoser(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    try:
        assert store.mirror is not None
        lossy = WeightStore(tmp_path / "w", DiskStore(), tmp_path / "assets", SHARD)
        lossy.mirror = Mirror(ObjectDepot(url))
        lossy.open("run", 0, BASE)
        proxy.lose, proxy.count = b"PUBLISHED/000001.json", 1
        made = lossy.publish(model(1), 1).version
        assert proxy.lost == 1
    finally:
        proxy.close()
    assert StoreReader(store.mirror.depot).look().newest == made


def test_a_flipped_bit_in_the_object_store_is_found(url: str, tmp_path: Path) -> None:
    opened(tmp_path, url).publish(model(1), 1)
    reader = StoreReader(ObjectDepot(url))
    manifest = reader.look().usable()[0]
    for name in manifest.files:
        key = f"{manifest.directory}/{name}"
        whole = reader.depot.read(key)
        assert whole is not None
        reader.depot.put(key, whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(WeightError, match=f"{name}: the bytes are not those"):
            reader.fetch(manifest, tmp_path / "back")
        shutil.rmtree(tmp_path / "back")
        reader.depot.put(key, whole)
