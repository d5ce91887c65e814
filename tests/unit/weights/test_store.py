"""A version appears whole or not at all, and a counter is never given out twice: with faults injected at every
file operation, with another publisher beside, and with a process that is killed in the middle."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.weight_files import as_rows, assets, host, model
from turnout.core.errors import WeightError
from turnout.core.version import WeightVersion
from turnout.placement.real import DiskStore
from turnout.weights.catalog import StoreReader
from turnout.weights.changes import collect
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.delta_io import TensorDelta
from turnout.weights.depot import FolderDepot
from turnout.weights.digest import root_of, tensor_digest
from turnout.weights.manifest import complete_versions, load_manifest
from turnout.weights.retention import FollowerWatch
from turnout.weights.store import Published, WeightStore
from turnout.weights.tensors import HostTensor
from turnout.weights.verify import verify

BASE = "b" * 32
SHARD = 200
INCARNATION = 3


def opened(
    root: Path, run_id: str = "run", files: Any = None, base: str = BASE, source: Any = None
) -> WeightStore:
    source = source or root.parent / "assets"
    if not source.exists():
        assets(source)
    store = WeightStore(root, files or DiskStore(), source, SHARD)
    store.open(run_id, INCARNATION, base)
    return store


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class FailingStore(DiskStore):
    """Raises OSError at the n-th operation (before it is done), or after it, and counts them."""

    def __init__(self, at: int, after: bool = False) -> None:
        self.at, self.after, self.seen, self.failed = at, after, 0, ""

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name not in ("read", "names", "create_once", "publish_folder", "remove_tree", "free_bytes"):
            return found

        def wrapped(*args: Any) -> Any:
            self.seen += 1
            due = self.seen == self.at
            self.failed = name if due else self.failed
            if due and not self.after:
                raise OSError(28, "No space left on device")
            result = found(*args)
            if due:
                raise OSError(5, "Input/output error")
            return result

        return wrapped


def test_versions_count_from_one_and_are_whole(tmp_path: Path) -> None:
    store = opened(tmp_path / "w")
    for counter in (1, 2):
        published = store.publish(model(counter), step=counter)
        assert published.version.counter == counter
        assert published.version.incarnation == INCARNATION
        assert published.version.root == root_of(model(counter))
        assert published.folder == tmp_path / "w" / f"weight_v00000{counter}"
        manifest = verify(published.folder)
        assert (manifest.version, manifest.step, manifest.run_id) == (published.version, counter, "run")
        assert published.bytes == sum(manifest.files.values())
        assert as_rows(read_checkpoint(published.folder)) == as_rows(model(counter))
        record = json.loads((tmp_path / "w" / "PUBLISHED" / f"00000{counter}.json").read_text())
        assert (record["counter"], record["root"]) == (counter, published.version.root)
        assert record["write_id"] == manifest.write_id
    assert [m.version.counter for m in store.versions()] == [1, 2]
    assert names(tmp_path / "w") == [
        "INCARNATIONS",
        "PUBLISHED",
        "run.json",
        "weight_v000001",
        "weight_v000002",
    ]
    assert (tmp_path / "w" / "weight_v000001" / "tokenizer.json").is_file()


def test_a_store_is_joined_again_by_its_own_run(tmp_path: Path) -> None:
    opened(tmp_path / "w").publish(model(), 1)
    assert opened(tmp_path / "w").publish(model(), 2).version.counter == 2


@pytest.mark.parametrize(("run_id", "base"), [("other", BASE), ("run", "c" * 32)])
def test_a_store_of_another_run_is_refused_and_left_alone(run_id: str, base: str, tmp_path: Path) -> None:
    opened(tmp_path / "w").publish(model(), 1)
    (tmp_path / "w" / "weight_v000002.tmp-abc").mkdir()
    before = names(tmp_path / "w")
    with pytest.raises(WeightError, match=r"belongs to run run: .*--update-weight-disk-dir"):
        opened(tmp_path / "w", run_id, base=base)
    assert names(tmp_path / "w") == before


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_a_broken_run_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "run.json").write_text(text)
    with pytest.raises(WeightError, match=r"run\.json"):
        opened(tmp_path / "w")


def test_the_counter_is_the_highest_of_folders_and_records(tmp_path: Path) -> None:
    store = opened(tmp_path / "w")
    assert store.newest_counter() == 0
    (tmp_path / "w" / "weight_v000007").mkdir()
    assert store.newest_counter() == 7
    (tmp_path / "w" / "PUBLISHED" / "1000009.json").write_text("{}")
    assert store.newest_counter() == 1_000_009
    for name in ("weight_v9999999.tmp-a", "weight_v", "weight_vx", ".removed-weight_v9999999-1"):
        (tmp_path / "w" / name).mkdir()
    assert store.newest_counter() == 1_000_009


def test_a_removed_counter_is_not_given_out_again(tmp_path: Path) -> None:
    store = opened(tmp_path / "w")
    gone = [store.retain(store.publish(model(step), step).version, 0.0) for step in range(4)]
    assert gone == [[], [], ["weight_v000001"], ["weight_v000002"]]
    for left in ("weight_v000003", "weight_v000004"):
        shutil.rmtree(tmp_path / "w" / left)
    assert store.versions() == []
    assert store.publish(model(), 4).version.counter == 5


def test_what_engines_followers_and_checkpoints_need_stays(tmp_path: Path) -> None:
    store = opened(tmp_path / "w")
    versions = [store.publish(model(0), 0).version]
    for step in range(1, 6):
        versions.append(delta_of(store, versions[-1], model(step - 1), model(step)).version)
        if step in (2, 4):
            store.publish_anchor(model(step), versions[-1], step)
    (tmp_path / "w" / "weight_notes").mkdir()
    store = opened(tmp_path / "w")
    depot = FolderDepot(tmp_path / "w", DiskStore())
    at = versions[3]
    depot.put(
        "followers/far.json", json.dumps({"counter": at.counter, "root": at.root, "incarnation": 3}).encode()
    )
    store.pin(versions[1])
    store.followers = FollowerWatch(100.0)
    assert store.retain(versions[5], 0.0) == ["weight_v000003"]
    store.pin(versions[5])
    store.pin(versions[5])
    assert store.retain(versions[5], 99.0) == ["weight_v000001", "weight_v000002"]
    assert store.retain(versions[5], 101.0) == ["weight_v000004", "weight_v000005"]
    left = [name for name in names(tmp_path / "w") if "_v" in name]
    assert left == ["anchor_v000003", "anchor_v000005", "weight_v000006"]
    assert (tmp_path / "w" / "weight_notes").is_dir()


def test_abandoned_and_unrecorded_folders_go_and_foreign_ones_stay(tmp_path: Path) -> None:
    old = opened(tmp_path / "w")
    for step in range(3):
        old.publish(model(step), step)
    (tmp_path / "w" / "PUBLISHED" / "000001.json").unlink()
    other = opened(tmp_path / "other", "other")
    other.record("0" * 32)
    foreign = other.publish(model(), 1).folder  # version 2 of the other run
    shutil.rmtree(tmp_path / "w" / "weight_v000002")
    shutil.copytree(foreign, tmp_path / "w" / "weight_v000002")
    heir = WeightStore(tmp_path / "w", DiskStore(), tmp_path / "assets", SHARD)
    heir.open("run", INCARNATION + 1, BASE, start=2)
    last = heir.publish(model(7), 3).version
    assert heir.retain(last, 0.0) == ["weight_v000001", "weight_v000003"]
    assert [name for name in names(tmp_path / "w") if "_v" in name] == ["weight_v000002", "weight_v000004"]


def test_incomplete_folders_are_no_versions(tmp_path: Path) -> None:
    store = opened(tmp_path / "w")
    for step in range(3):
        store.publish(model(step), step)
    (tmp_path / "w" / "weight_v000001" / "DONE").unlink()
    shard = next((tmp_path / "w" / "weight_v000002").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert [m.version.counter for m in store.versions()] == [3]


def test_nothing_is_written_without_room_for_two_versions(tmp_path: Path) -> None:
    class Full(DiskStore):
        free = 1 << 40

        def free_bytes(self, path: Path) -> int:
            return self.free

    files = Full()
    store = opened(tmp_path / "w", files=files)
    size = store.publish(model(), 1).bytes
    files.free = 2 * size - 1
    before = names(tmp_path / "w")
    with pytest.raises(
        WeightError, match=f"version 2 is not written: {files.free} bytes free.*need {2 * size}"
    ):
        store.publish(model(), 2)
    assert names(tmp_path / "w") == before
    files.free = 2 * size
    assert store.publish(model(), 2).version.counter == 2


@pytest.mark.parametrize("after", [False, True], ids=["instead", "after"])
@pytest.mark.parametrize("at", range(1, 12))
def test_a_fault_at_any_operation_of_the_store(at: int, after: bool, tmp_path: Path) -> None:
    opened(tmp_path / "w").publish(model(1), 1)
    files = FailingStore(10_000)
    store = opened(tmp_path / "w", files=files)
    files.at, files.after, files.seen = at, after, 0
    try:
        store.publish(model(2), 2)
        failed = False
    except WeightError as fault:
        failed = True
        assert str(tmp_path / "w") in str(fault)
    settled = (
        after and files.failed == "create_once"
    )  # the record was there: its answer was lost, and read back
    assert failed == (files.seen >= at and not settled), "an OSError was swallowed, or there was none"
    check_reopened(tmp_path / "w", taken={1} if failed else {1, 2})


@pytest.mark.parametrize(
    "operation", ["open", "mkdir", "write_bytes", "rename", "stat", "write_text", "copyfile"]
)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_fault_at_any_operation_on_files(
    operation: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path / "w")
    store.publish(model(1), 1)
    monkeypatch.setattr(*failing(operation, at, tmp_path / "w"))
    try:
        store.publish(model(2), 2)
        failed = False
    except WeightError as fault:
        failed = True
        assert "No space left" in str(fault)
    monkeypatch.undo()
    left = [name for name in names(tmp_path / "w") if "tmp-" in name]
    assert left == []
    check_reopened(tmp_path / "w", taken={1} if failed else {1, 2})


def failing(operation: str, at: int, root: Path) -> tuple[Any, str, Callable[..., Any]]:
    owner: Any = shutil if operation == "copyfile" else Path
    real, seen = getattr(owner, operation), 0

    def wrapped(*args: Any, **more: Any) -> Any:
        nonlocal seen
        target = Path(args[1] if operation == "copyfile" else args[0])
        if ".tmp-" in str(target.relative_to(root) if target.is_relative_to(root) else ""):
            seen += 1
            if seen == at:
                raise OSError(28, "No space left on device")
        return real(*args, **more)

    return owner, operation, wrapped


def check_reopened(root: Path, taken: set[int], source: Path | None = None) -> None:
    """After any fault: no leftover, only whole versions, and a counter that nobody had."""
    store = opened(root, source=source)
    for folder in (root, root / "PUBLISHED"):
        assert [name for name in names(folder) if ".tmp-" in name or name.startswith(".")] == []
    folders = {int(name[8:]) for name in names(root) if name.startswith("weight_v")}
    assert {m.version.counter for m in complete_versions(root)} == folders >= taken
    for manifest in complete_versions(root):
        verify(root / manifest.version.directory)
    counter = store.publish(model(9), 9).version.counter
    assert counter > max(folders)
    assert counter == max(int(name[:6]) for name in names(root / "PUBLISHED"))


@pytest.mark.parametrize("tensors", [[host("a"), host("a")], None], ids=["twice", "export fails"])
def test_an_export_that_fails_leaves_nothing(tensors: Any, tmp_path: Path) -> None:
    def broken() -> Any:
        yield host("a")
        raise RuntimeError("the trainer died")

    store = opened(tmp_path / "w")
    with pytest.raises((WeightError, RuntimeError), match=r"exported twice|the trainer died"):
        store.publish(broken() if tensors is None else tensors, 1)
    assert names(tmp_path / "w") == ["INCARNATIONS", "PUBLISHED", "run.json"]
    assert store.publish(model(), 1).version.counter == 1


def test_of_two_publishers_one_is_refused(tmp_path: Path) -> None:
    """Both take the same number; the second to finish must not replace what the first has published."""
    one, two = opened(tmp_path / "w"), opened(tmp_path / "w")

    def slow() -> Any:
        yield from model(2)
        assert one.publish(model(1), 1).version.counter == 1

    with pytest.raises(WeightError, match="no version could be written"):
        two.publish(slow(), 1)
    assert as_rows(read_checkpoint(tmp_path / "w" / "weight_v000001")) == as_rows(model(1))
    assert two.publish(model(3), 2).version.counter == 2


def test_a_record_without_its_folder_is_still_taken(tmp_path: Path) -> None:
    store = opened(tmp_path / "w")

    def meanwhile() -> Any:
        yield from model()
        (tmp_path / "w" / "PUBLISHED" / "000001.json").write_text("{}")

    with pytest.raises(WeightError, match="published by somebody else"):
        store.publish(meanwhile(), 1)
    assert store.newest_counter() == 1


def test_a_lost_answer_is_settled_by_whose_record_it_is(tmp_path: Path) -> None:
    """The link was made and its answer lost; or somebody else's was there first."""

    class Lossy(DiskStore):
        def create_once(self, path: Path, data: bytes) -> bool:
            if path.parent.name == "PUBLISHED":
                super().create_once(path, foreign if foreign is not None else data)
                raise OSError(5, "Input/output error")
            return super().create_once(path, data)

    foreign: bytes | None = None
    store = opened(tmp_path / "w", files=Lossy())
    assert store.publish(model(), 1).version.counter == 1
    foreign = b'{"incarnation": 0, "counter": 2, "root": "x", "write_id": "another"}'
    with pytest.raises(WeightError, match="published by somebody else"):
        store.publish(model(), 2)


def test_wgt_05_numbers_go_on_and_abandoned_versions_are_told_apart(tmp_path: Path) -> None:
    old = opened(tmp_path / "w")
    for step in range(3):
        old.publish(model(step), step)
    heir = WeightStore(tmp_path / "w", DiskStore(), tmp_path / "assets", SHARD)
    heir.open("run", INCARNATION + 1, BASE, start=2)
    assert heir.publish(model(5), 3).version == WeightVersion(INCARNATION + 1, 4, root_of(model(5)))
    found = StoreReader(FolderDepot(tmp_path / "w", DiskStore())).look()
    assert [m.version.counter for m in found.usable()] == [1, 2, 4]
    assert found.lineage.abandoned(found.records[3]) and found.newest == found.records[4]


def test_a_superseded_incarnation_writes_and_removes_nothing(tmp_path: Path) -> None:
    old = opened(tmp_path / "w")
    old.publish(model(1), 1)
    heir = WeightStore(tmp_path / "w", DiskStore(), tmp_path / "assets", SHARD)
    heir.open("run", INCARNATION + 1, BASE, start=1)
    before = names(tmp_path / "w")
    for work in (
        lambda: old.publish(model(2), 2),
        lambda: old.record("0" * 32),
        lambda: old.retain(WeightVersion(INCARNATION, 1, "0" * 32), 0.0),
        lambda: opened(tmp_path / "w"),
    ):
        with pytest.raises(WeightError, match=f"incarnation {INCARNATION + 1} of this run has taken over"):
            work()
    assert names(tmp_path / "w") == before
    with pytest.raises(WeightError, match="goes on from version 1, this one from 0"):
        WeightStore(tmp_path / "w", DiskStore(), tmp_path / "assets", SHARD).open(
            "run", INCARNATION + 1, BASE
        )


def test_an_incarnation_taken_over_in_the_middle_of_a_write(tmp_path: Path) -> None:
    """The successor opens the store and publishes while the old one's export runs."""
    old = opened(tmp_path / "w")
    heir = WeightStore(tmp_path / "w", DiskStore(), tmp_path / "assets", SHARD)

    def slow() -> Any:
        yield from model(2)
        heir.open("run", INCARNATION + 1, BASE)
        heir.publish(model(1), 1)

    with pytest.raises(WeightError):
        old.publish(slow(), 1)
    assert names(tmp_path / "w") == ["INCARNATIONS", "PUBLISHED", "run.json", "weight_v000001"]
    assert as_rows(read_checkpoint(tmp_path / "w" / "weight_v000001")) == as_rows(model(1))


def test_the_model_is_part_of_the_identity(tmp_path: Path) -> None:
    opened(tmp_path / "w")
    (tmp_path / "assets" / "config.json").write_text('{"model_type": "another"}')
    with pytest.raises(WeightError, match="it has model "):
        opened(tmp_path / "w")


def test_an_anchor_is_the_delta_version_in_full(tmp_path: Path) -> None:
    store = opened(tmp_path / "w")
    base = store.publish(model(1), 1).version
    made = delta_of(store, base, model(1), model(2))
    anchor = store.publish_anchor(model(2), made.version, 2)
    assert verify(anchor.folder).version == made.version and anchor.folder.name == "anchor_v000002"
    assert names(tmp_path / "w" / "PUBLISHED") == ["000001.json", "000002.json"]
    with pytest.raises(WeightError, match="in full has the root digest"):
        store.publish_anchor(model(3), made.version, 2)
    assert store.newest_counter() == 2 and "anchor_v000002" in names(tmp_path / "w")


def delta_of(
    store: WeightStore, base: WeightVersion, old: list[HostTensor], new: list[HostTensor]
) -> Published:
    deltas = (
        TensorDelta(collect(before.bits, after), before.bits, tensor_digest(before), tensor_digest(after))
        for before, after in zip(old, new)
    )
    return store.publish_delta(deltas, base, "indices", base.counter + 1)


_CHILD = """
import os, signal, sys, traceback
from pathlib import Path
from tests.weight_files import model
from turnout.placement.real import DiskStore
from turnout.weights.store import WeightStore

seen = 0

def one(root, at):
    def trace(event, args):
        global seen
        writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.rename", "os.mkdir", "os.link", "os.remove", "shutil.rmtree"):
            if str(args[0]).startswith(str(root / "w")):
                seen += 1
                if seen == at:
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(trace)
    store = WeightStore(root / "w", DiskStore(), root.parent / "assets", 200)
    store.open("run", 3, "b" * 32)
    made = store.publish(model(3), 3).version
    (root / "published").write_text(str(made.counter))
    store.retain(made, 0.0)
    (root / "operations").write_text(str(seen))

for text in sys.argv[1:]:
    root = Path(text)
    child = os.fork()
    if child == 0:
        try:
            one(root, int(root.name))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def run_children(*roots: Path) -> list[int]:
    """One process per folder; the one for folder N kills itself at its N-th operation in the store N/w."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *map(str, roots)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TURNOUT_NATIVE": "0"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr == ""
    return [int(line) for line in done.stdout.split()]


def test_wgt_19_kill_9_at_any_moment_of_a_publish(tmp_path: Path) -> None:
    """The child kills itself at its n-th file operation in the store: open, mkdir, link, rename, remove."""
    assets(tmp_path / "assets")
    for step in (1, 2):
        opened(tmp_path / "base").publish(model(step), step)
    whole = tmp_path / "0"
    shutil.copytree(tmp_path / "base", whole / "w")
    assert run_children(whole) == [0]
    assert (whole / "published").read_text() == "3"
    operations = int((whole / "operations").read_text())
    assert operations > 20
    roots = [tmp_path / str(at) for at in range(1, operations + 1)]
    for root in roots:
        shutil.copytree(tmp_path / "base", root / "w")
    assert run_children(*roots) == [-signal.SIGKILL] * operations
    outcomes = set()
    for root in roots:
        visible = {name for name in names(root / "w") if name.startswith("weight_v") and "tmp" not in name}
        outcomes.add(tuple(sorted(visible)))
        for name in visible:
            load_manifest(root / "w" / name)
        check_reopened(
            root / "w", taken={3} if (root / "published").exists() else set(), source=tmp_path / "assets"
        )
    one, two, three = "weight_v000001", "weight_v000002", "weight_v000003"
    assert outcomes == {(one, two), (one, two, three), (two, three)}


def test_kill_9_while_a_store_is_made(tmp_path: Path) -> None:
    source = assets(tmp_path / "assets")
    roots = [tmp_path / str(at) for at in range(1, 8)]
    for root in roots:
        root.mkdir()
    assert run_children(*roots) == [-signal.SIGKILL] * len(roots)
    for root in roots:
        store = opened(root / "w", source=source)
        assert store.publish(model(), 1).version.counter == 1
        assert [name for name in names(root / "w") if name.startswith(".")] == []
