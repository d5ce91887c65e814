"""A follower in a world of its own: what it takes, what it refuses, and that no kill or fault leaves a mix."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.followed import stepped, tiny_publisher
from tests.follower_kills import scripted_kills
from tests.follower_world import Fate, World, make_store
from tests.published import Publisher, bits_of, deltas, first, moved
from turnout.core.errors import ConfigError, EngineError, WeightError

Store = tuple[Path, dict[int, Any]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    root = tmp_path_factory.mktemp("store") / "weights"
    return root, make_store(root)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MB: the tiny model has a fifth of that."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not allowed here; other tests inject ENOSPC instead")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_it_follows_to_the_newest_version(store: Store, tmp_path: Path) -> None:
    world = World(*store, tmp_path / "host", 0)
    for visible in (1, 2, 3, 6):
        world.life(visible)
        held, found = world.looked()
        assert (held, found) == (visible, bits_of(store[1][visible]))
        assert world.engine.tensors == bits_of(store[1][visible])
    assert world.engine.loads == 4  # versions 4 and 5 were skipped for the engine


def test_wgt_04_twenty_scripted_kills(tmp_path: Path) -> None:
    table = scripted_kills(range(1000, 1020), tmp_path)
    assert table.total() == 20


def test_a_late_joiner_reads_no_more_than_the_cheapest_route(store: Store, tmp_path: Path) -> None:
    world = World(*store, tmp_path / "late", 0)
    world.life(6)
    size = {p.name: sum(f.stat().st_size for f in p.iterdir() if "json" not in f.name or "index" in f.name)
            for p in store[0].glob("weight_v*")}  # fmt: skip
    cheapest = size["weight_v000004"] + size["weight_v000005"] + size["weight_v000006"]
    config = len('{"model_type": "toy"}')
    assert world.depot.bytes_read <= 1.05 * (cheapest + config)
    before = World(*store, tmp_path / "offline", 0)
    before.life(1)
    before.life(6)
    assert before.looked() == (6, bits_of(store[1][6]))


def test_a_model_that_lies_there_already_is_taken_over(store: Store, tmp_path: Path) -> None:
    """The folder has version 4, put there by hand: only deltas are read."""
    host = tmp_path / "host"
    shutil.copytree(store[0] / "weight_v000004", host)
    world = World(*store, host, 0)
    world.life(6)
    deltas = [store[0] / f"weight_v00000{n}" for n in (5, 6)]
    assert world.depot.bytes_read == sum(f.stat().st_size for d in deltas for f in d.glob("delta-*"))
    assert world.looked() == (6, bits_of(store[1][6]))
    assert not (host / "manifest.json").exists()  # an engine would hold the files against it


def test_and_nothing_is_said_of_it_before_the_store_has_a_version(store: Store, tmp_path: Path) -> None:
    """A follower that begins before its run does; and a record that never changes is read once."""
    host = tmp_path / "host"
    shutil.copytree(store[0] / "weight_v000004", host)
    world = World(*store, host, 0)
    follower = world.follower(Fate(), 0)
    reads = Counter[str]()
    read = world.depot.read
    world.depot.read = lambda key: (reads.update([key]), read(key))[1]  # type: ignore[method-assign]

    async def life() -> None:
        assert await follower.turn() == ""
        world.depot.visible = 6
        for _ in range(3):
            assert await follower.turn() == ""

    asyncio.run(life())
    follower.local.close()
    assert world.looked() == (6, bits_of(store[1][6]))
    assert {key for key, times in reads.items() if times > 1} == {"run.json"}


def test_weights_of_somebody_else_are_left_alone(store: Store, tmp_path: Path) -> None:
    host = tmp_path / "host"
    shutil.copytree(store[0] / "weight_v000004", host)
    weights = sorted(host.glob("*.safetensors"))
    data = bytearray(weights[0].read_bytes())
    data[-1] ^= 1
    weights[0].write_bytes(data)
    world = World(*store, host, 0)
    with pytest.raises(ConfigError, match="no version of this store"):
        world.life(6)
    assert weights[0].read_bytes() == data
    assert world.engine.loads == 0


def test_another_runs_checkpoint_is_refused(store: Store, tmp_path: Path) -> None:
    root = tmp_path / "other" / "weights"
    publisher = Publisher(root, first(9), run_id="run-2")
    publisher.full()
    world = World(*store, tmp_path / "host", 0)
    world.life(2)
    other = World(root, publisher.history, tmp_path / "host", 0)
    with pytest.raises(ConfigError, match=r"run-1.*run-2"):
        other.life(1)
    assert world.looked() == (2, bits_of(store[1][2]))


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "nan", "wrong"])
def test_a_damaged_delta_never_reaches_the_engine(tmp_path: Path, damage: str) -> None:
    root = tmp_path / "store" / "weights"
    publisher = Publisher(root, first())
    publisher.full()
    if damage == "nan":
        bad = list(moved(publisher.now, 2))
        bad[0].bits[3] = 0x7FC1
        publisher.delta(bad)
    elif damage == "wrong":  # sound by its checksums and on the right base, and leads elsewhere than it says
        after = moved(publisher.now, 2)
        lies = deltas(publisher.now, after)
        at = next(n for n, delta in enumerate(lies) if delta.change.count)
        lies[at] = replace(lies[at], after="5" * 32)
        publisher.store.publish_delta(lies, publisher.version, "indices", 0)
        publisher.history[2] = after
    else:
        publisher.delta(moved(publisher.now, 2))
        file = min((root / "weight_v000002").glob("delta-*"))
        data = bytearray(file.read_bytes())
        data[-3] ^= 4
        if damage == "missing":
            file.unlink()
        else:
            file.write_bytes(data if damage == "flip" else data[:-3])
    world = World(root, publisher.history, tmp_path / "host", 0)
    world.life(1)
    loads = world.engine.loads
    if damage in ("cut", "missing"):  # no complete version: it is as if it were not there
        world.life(1)
    else:
        with pytest.raises(AssertionError, match="not at version 2"):
            world.life(2)
        assert not [key for key in world.depot.fetched if "v000001" in key], "what was held was touched"
    assert world.engine.loads == loads
    assert world.engine.tensors == bits_of(publisher.history[1])
    assert world.looked() == (1, bits_of(publisher.history[1]))
    version = publisher.full(moved(first(), 3))  # a sound one leads on
    world.life(version.counter)
    assert world.looked() == (3, bits_of(publisher.history[3]))


@pytest.mark.parametrize("visible", [2, 4])
def test_a_full_disk_loses_nothing_and_is_told_once(store: Store, tmp_path: Path, visible: int) -> None:
    """In the journal (version 2), and while a full version comes (version 4)."""
    world = World(*store, tmp_path / "host", 0)
    world.life(1)
    follower = world.follower(Fate(), visible)
    full = {"left": 3}
    append, fetch = world.files.append, world.depot.fetch_file

    def no_room(call: Any) -> Any:
        def limited(*arguments: Any) -> None:
            if full["left"] > 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            call(*arguments)

        return limited

    world.files.append = no_room(append)  # type: ignore[method-assign]
    if visible == 4:
        world.depot.fetch_file = no_room(fetch)  # type: ignore[method-assign]

    async def turns() -> list[str]:
        found = []
        while full["left"] >= 0:
            found.append(await follower.turn())
            full["left"] -= 1
        return found

    faults = asyncio.run(turns())
    follower.local.close()
    assert ["No space left" in fault for fault in faults] == [True, True, True, False]
    assert len([line for line in world.lines if "No space left" in line]) == 1
    assert world.looked() == (visible, bits_of(store[1][visible]))


@pytest.mark.parametrize("kind", ["delta", "full"])
def test_a_disk_that_is_really_full(tmp_path: Path, small_disk: Path, kind: str) -> None:
    root = tmp_path / "weights"
    publisher = tiny_publisher(root)
    publisher.full()
    after = stepped(publisher.now, 2, share=1.0)
    publisher.delta(after) if kind == "delta" else publisher.full(after)
    world = World(root, publisher.history, small_disk / "host", 0)
    world.life(1)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - 100_000))
    follower = world.follower(Fate(), 2)

    async def turns() -> None:
        for _ in range(2):
            assert "No space left" in await follower.turn()
            assert world.engine.tensors == bits_of(publisher.history[1])
        ballast.unlink()
        assert await follower.turn() == ""

    asyncio.run(turns())
    follower.local.close()
    assert world.looked() == (2, bits_of(publisher.history[2]))
    assert world.engine.tensors == bits_of(publisher.history[2])


def test_an_engine_that_fails_once_is_loaded_again(store: Store, tmp_path: Path) -> None:
    for trouble in ("fails before", "fails after", "loads wrong"):
        world = World(*store, tmp_path / trouble.replace(" ", "-"), 0)
        world.life(1)
        world.engine.trouble = [trouble]
        world.life(2)
        assert world.engine.tensors == bits_of(store[1][2])
        assert (world.engine.served_label[:7], world.engine.loads) == ("v000002", 3)


def test_an_engine_that_never_loads_right_ends_the_follower(store: Store, tmp_path: Path) -> None:
    world = World(*store, tmp_path / "host", 0)
    world.life(1)
    world.engine.trouble = ["fails after"] * 9
    with pytest.raises(EngineError, match="not flushed"):
        world.life(2)
    assert world.engine.loads == 1 + 3
    assert world.engine.served_label == "unknown"
    position = json.loads((store[0] / "followers" / "host-1.json").read_text())
    assert (position["counter"], position["level"]) == (2, "")
    world.engine.trouble = ["loads wrong"] * 9
    with pytest.raises(WeightError, match="is not v000002"):
        world.life(2)


def test_an_engine_that_restarted_is_loaded_again(store: Store, tmp_path: Path) -> None:
    world = World(*store, tmp_path / "host", 0)
    world.life(2)
    loads = world.engine.loads
    world.life(2)
    assert world.engine.loads == loads  # a restarted follower has it prove what it names
    follower = world.follower(Fate(), 2)

    async def restarted() -> None:
        await follower.turn()
        world.engine.served, world.engine.served_label, world.engine.tensors = "base", "default", {}
        await follower.turn()

    asyncio.run(restarted())
    follower.local.close()
    assert (world.engine.loads, world.engine.tensors) == (loads + 1, bits_of(store[1][2]))


def test_a_file_changed_behind_its_back_is_found_and_replaced(store: Store, tmp_path: Path) -> None:
    world = World(*store, tmp_path / "host", 0)
    world.life(5)
    path = min(world.host.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    world.life(6)
    assert any("not what its state says" in line for line in world.lines)
    assert world.looked() == (6, bits_of(store[1][6]))


def test_abandoned_versions_are_left(tmp_path: Path) -> None:
    """The run is resumed from version 2: who holds that goes on by a delta, who holds 3 begins from a full one."""
    root = tmp_path / "store" / "weights"
    publisher = Publisher(root, first())
    publisher.full()
    publisher.delta(moved(publisher.now, 2))
    publisher.delta(moved(publisher.now, 3))
    ancestor, ahead = (World(root, publisher.history, tmp_path / f"host-{n}", 0) for n in (2, 3))
    ancestor.life(2)
    ahead.life(3)
    publisher.resume(1, start=2)
    publisher.delta(moved(publisher.now, 9))
    ancestor.life(4)
    assert {key.split("/")[0] for key in ancestor.depot.fetched} == {"weight_v000004"}
    ahead.life(4)
    assert len({key.split("/")[0] for key in ahead.depot.fetched}) == 3  # versions 1, 2 and 4
    for world in (ancestor, ahead):
        assert world.looked() == (4, bits_of(publisher.history[4]))
        assert world.engine.tensors == bits_of(publisher.history[4])


def test_equal_weights_under_another_name(tmp_path: Path) -> None:
    root = tmp_path / "store" / "weights"
    publisher = Publisher(root, first())
    publisher.full()
    publisher.delta(publisher.now)
    world = World(root, publisher.history, tmp_path / "host", 0)
    world.life(1)
    world.life(2)
    assert world.depot.bytes_read == 0
    assert world.looked() == (2, bits_of(publisher.now))
    assert world.engine.served_label == publisher.version.label


def test_a_version_that_is_removed_while_it_is_fetched(store: Store, tmp_path: Path) -> None:
    """Retention was faster: the follower looks again and takes another way."""
    world = World(*store, tmp_path / "host", 0)
    world.life(1)
    follower = world.follower(Fate(), 6)
    fetch = world.depot.fetch_file
    gone = []

    def removed(key: str, target: Path) -> None:
        if not gone and "v000005" in key:
            gone.append(key)
            raise WeightError(f"{key}: no such file")
        fetch(key, target)

    world.depot.fetch_file = removed  # type: ignore[method-assign]

    async def turns() -> None:
        while follower.local.held is None or follower.local.held.counter < 6:
            await follower.turn()

    asyncio.run(turns())
    follower.local.close()
    assert gone and world.looked() == (6, bits_of(store[1][6]))


def test_what_a_hook_brings_is_not_fetched(store: Store, tmp_path: Path) -> None:
    """Right files count; a wrong one is fetched over."""

    def bring(folder: Path) -> None:
        for path in (store[0] / folder.name).iterdir():
            (folder / path.name).write_bytes(path.read_bytes() if path.name != "config.json" else b"{}")

    world = World(*store, tmp_path / "host", 0)
    follower = world.follower(Fate(), 2, bring)
    asyncio.run(follower.turn())
    asyncio.run(follower.turn())
    follower.local.close()
    assert world.looked() == (2, bits_of(store[1][2]))
    assert world.depot.fetched == ["weight_v000001/config.json"]


def test_its_position_is_told(store: Store, tmp_path: Path) -> None:
    world = World(*store, tmp_path / "host", 0)
    world.life(3)
    position = json.loads((store[0] / "followers" / "host-1.json").read_text())
    assert (position["counter"], position["level"], position["run_id"]) == (3, "memory", "run-1")


def test_one_process_keeps_a_folder(store: Store, tmp_path: Path) -> None:
    world = World(*store, tmp_path / "host", 0)
    world.life(1)
    first_one = world.follower(Fate(), 2)
    first_one.local.open()
    with pytest.raises(ConfigError, match="kept by another process"):
        world.life(2)
    first_one.local.close()
