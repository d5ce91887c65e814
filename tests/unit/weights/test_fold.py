"""A chain is proved from an anchor or the base, and folded into one delta that does the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.object_store import environment, s3_server
from tests.unit.weights.test_store import SHARD, delta_of
from tests.weight_files import as_rows, assets, model
from turnout.cli.weights import command
from turnout.core.errors import WeightError
from turnout.placement.real import DiskStore
from turnout.weights.catalog import StoreReader
from turnout.weights.chain import cheapest
from turnout.weights.changes import collect
from turnout.weights.checkpoint_io import write_checkpoint
from turnout.weights.delta_io import TensorDelta
from turnout.weights.depot import FolderDepot
from turnout.weights.digest import root_of, tensor_digest
from turnout.weights.fold import fold, plan_fold
from turnout.weights.mirror import Mirror
from turnout.weights.object_depot import ObjectDepot
from turnout.weights.store import WeightStore
from turnout.weights.tensors import HostTensor
from turnout.weights.verify import Replica, Walker, verify, verify_store


def states() -> list[list[HostTensor]]:
    """Five states; each changes a few elements of some tensors."""
    found = [model(0)]
    for step in range(1, 5):
        changed = []
        for tensor in found[-1]:
            bits = tensor.bits.copy()
            if bits.size > step and len(tensor.name) % 2 == step % 2:
                bits[step] ^= bits.dtype.type(step)
                bits[0] ^= bits.dtype.type(1)
            changed.append(HostTensor(tensor.name, tensor.dtype, tensor.shape, bits))
        found.append(changed)
    return found


STATES = states()


def chain_store(folder: Path, prepare: Callable[[WeightStore], None] = lambda _: None) -> tuple[Path, Path]:
    """A store with four deltas on the checkpoint that the run began with; and that checkpoint."""
    base = assets(folder / "base")
    (base / "model.safetensors").unlink()
    write_checkpoint(base, STATES[0], 1 << 20)
    store = WeightStore(folder / "w", DiskStore(), base, SHARD)
    prepare(store)
    store.open("run", 0, root_of(STATES[0]))
    version = replace(store.record(root_of(STATES[0])), counter=0)
    for step in range(1, 5):
        version = delta_of(store, version, STATES[step - 1], STATES[step]).version
    return folder / "w", base


def catalog(root: Path):
    return StoreReader(FolderDepot(root, DiskStore())).look()


def test_every_root_is_proved_from_the_base(tmp_path: Path) -> None:
    root, base = chain_store(tmp_path)
    assert [verdict.fault for verdict in verify_store(root, base)] == [""] * 4
    unproved = list(verify_store(root))
    assert all(
        "no way leads from None" in verdict.fault and "--base" in verdict.fault for verdict in unproved
    )
    assert not any(verdict.reachable for verdict in unproved)


def test_a_delta_that_does_not_make_what_it_claims_is_found(tmp_path: Path) -> None:
    """Every checksum right: the publisher itself wrote one wrong pattern, and digests of the right ones."""
    root, base = chain_store(tmp_path)
    store = WeightStore(root, DiskStore(), base, SHARD)
    store.open("run", 0, root_of(STATES[0]))
    parent = catalog(root).records[5]

    target = [replace(t, bits=t.bits ^ t.bits.dtype.type(t.name == "head")) for t in STATES[4]]

    def lying() -> Iterator[TensorDelta]:
        for old, new in zip(STATES[4], target):
            change = collect(old.bits, new)
            if new.name == "head":
                change = replace(change, bits=change.bits ^ change.bits.dtype.type(2))
            yield TensorDelta(change, old.bits, tensor_digest(old), tensor_digest(new))

    made = store.publish_delta(lying(), parent, "indices", 6)
    verify(made.folder)
    last = delta_of(store, made.version, target, model(7))
    verdicts = {verdict.folder: verdict.fault for verdict in verify_store(root, base)}
    assert "head does not become what the manifest says" in verdicts[made.folder.name]
    assert "no way leads" in verdicts[last.folder.name], "nothing is proved through a wrong one"
    assert verdicts["weight_v000005"] == ""


@pytest.mark.parametrize(("first", "last"), [(0, 5), (2, 5), (0, 3)])
def test_a_fold_does_what_its_deltas_do(first: int, last: int, tmp_path: Path) -> None:
    root, base = chain_store(tmp_path)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    found = catalog(root)
    plan = replace(plan_fold(found, (first, last), "", 1 << 20), base=base)
    made = fold(root, found, plan, DiskStore(), "w1")
    assert made.directory == f"fold_v{first:06d}-v{last:06d}"
    assert {path: path.read_bytes() for path in before} == before, "a published folder was touched"
    found = catalog(root)
    held = made.base.root if made.base else ""
    assert cheapest(found.usable(), made.version.root, held).deltas == (made,)
    replica = Walker(root, base).at(made.base.root if made.base else "", found.usable())
    for _ in replica.apply(root / made.directory, made):
        pass
    expected = as_rows(STATES[last - 1])
    assert {name: bits.tobytes() for name, bits in replica.bits.items()} == {
        n: row[2] for n, row in expected.items()
    }
    assert {verdict.fault for verdict in verify_store(root, base)} == {""}
    with pytest.raises(WeightError, match="is there already"):
        fold(root, found, plan, DiskStore(), "w2")


def test_what_cannot_be_folded_is_told(tmp_path: Path) -> None:
    root, _ = chain_store(tmp_path)
    found = catalog(root)
    for span, says in (
        ((0, 9), "version 9 was never published"),
        ((4, 5), "1 deltas lead"),
        ((5, 2), "no way"),
    ):
        with pytest.raises(WeightError, match=says):
            plan_fold(found, span, "", 1 << 20)


@pytest.mark.parametrize("at", ["write_delta", "publish_folder"])
def test_a_fold_that_fails_leaves_nothing(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, base = chain_store(tmp_path)
    before = sorted(root.iterdir())
    found = catalog(root)
    plan = replace(plan_fold(found, (0, 5), "", 1 << 20), base=base)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if at == "write_delta":
        monkeypatch.setattr("turnout.weights.fold.write_delta", full)
    else:
        monkeypatch.setattr(DiskStore, "publish_folder", full)
    with pytest.raises(WeightError, match="No space left"):
        fold(root, found, plan, DiskStore(), "w1")
    assert sorted(root.iterdir()) == before


def test_the_command_lists_verifies_and_compacts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, base = chain_store(tmp_path)
    assert command(["compact", str(root), "--from", "0", "--to", "4", "--base", str(base)]) == 0
    assert capsys.readouterr().out.startswith("fold_v000000-v000004")
    (root / "weight_v000003" / "DONE").unlink()
    assert command(["ls", str(root)]) == 0
    out = capsys.readouterr().out
    folders = ["fold_v000000-v000004", *(f"weight_v{n:06d}" for n in (2, 3, 4, 5))]
    rows = {name: line for line in out.splitlines() for name in folders if f" {name} " in line}
    assert list(rows) == [folders[1], folders[0], *folders[3:], folders[2]], "by version, the incomplete last"
    assert "incomplete" in rows["weight_v000003"] and "newest" in rows["weight_v000005"]
    assert "indices" in rows["weight_v000002"] and "published, no folder" in out
    assert command(["verify", str(root), "--base", str(base)]) == WeightError.exit_status
    out = capsys.readouterr().out
    assert "weight_v000003    WRONG" in out and "NOT PROVED: no way leads" in out
    assert out.count("right") == 3, "the fold leads around the missing one"
    assert command(["verify", str(root / "weight_v000002")]) == 0


def test_the_command_on_an_object_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "s3://weights/fold"
    with s3_server() as endpoint:
        for name, value in environment(endpoint).items():
            monkeypatch.setenv(name, value)

        def mirrored(store: WeightStore) -> None:
            store.mirror = Mirror(ObjectDepot(url))

        root, base = chain_store(tmp_path, mirrored)
        assert command(["compact", url, "--from", "2", "--to", "5", "--base", str(base)]) == 0
        assert not (root / "fold_v000002-v000005").exists()
        assert command(["ls", url]) == 0
        assert "fold_v000002-v000005" in capsys.readouterr().out
        assert command(["verify", url, "--base", str(base)]) == 0
        assert capsys.readouterr().out.count("right") == 5
        depot = ObjectDepot(url)
        key = "weight_v000004/delta-00000.safetensors"
        data = depot.read(key)
        assert data is not None
        depot.put(key, data[:-1] + bytes([data[-1] ^ 1]))
        assert command(["verify", url, "--base", str(base)]) == WeightError.exit_status
        assert "WRONG" in capsys.readouterr().out


def test_a_replica_refuses_a_delta_of_another_base(tmp_path: Path) -> None:
    root, base = chain_store(tmp_path)
    replica = Replica(base)
    late = verify(root / "weight_v000003")
    with pytest.raises(WeightError, match="is a delta to"):
        list(replica.apply(root / late.directory, late))
