"""Checkpoint folders in and out, and every way in which one can be incomplete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.weight_files import as_rows, assets, host, model
from turnout.core.errors import WeightError
from turnout.weights.checkpoint_io import INDEX, SINGLE, copy_assets, read_checkpoint, write_checkpoint
from turnout.weights.digest import root_of, tensor_digest
from turnout.weights.safetensors_file import read_file, write_file

WHOLE = 1 << 30


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def sharded(folder: Path) -> Path:
    """Three shards: a; b; c and d."""
    write_checkpoint(folder, [host("a"), host("b"), host("c", shape=(1,)), host("d", shape=(1,))], 24)
    return folder


def edit_index(folder: Path, edit: Any) -> None:
    rows = json.loads((folder / INDEX).read_text())
    edit(rows["weight_map"])
    (folder / INDEX).write_text(json.dumps(rows))


def read(folder: Path) -> list[Any]:
    return list(read_checkpoint(folder))


def test_a_small_model_is_one_file_without_an_index(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, model(), WHOLE)
    assert names(tmp_path) == [SINGLE]
    assert written.files == {SINGLE: (tmp_path / SINGLE).stat().st_size}
    assert as_rows(read(tmp_path)) == as_rows(model())


@pytest.mark.parametrize("shard_bytes", [1, 24, 60, 200, WHOLE])
def test_shards_of_any_size_hold_the_same_weights(shard_bytes: int, tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, iter(model()), shard_bytes)
    assert as_rows(read(tmp_path)) == as_rows(model())
    assert written.root == root_of(model())
    for tensor in model():
        entry = written.tensors[tensor.name]
        assert (entry.dtype, entry.shape, entry.digest) == (tensor.dtype, tensor.shape, tensor_digest(tensor))
        assert tensor.name in {t.name for t in read_file(tmp_path / entry.file)}
    for file in names(tmp_path):
        held = list(read_file(tmp_path / file)) if file != INDEX else []
        assert sum(t.nbytes for t in held) <= shard_bytes or len([t for t in held if t.nbytes]) == 1


def test_shards_are_named_and_indexed_as_elsewhere(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, [host("a"), host("b"), host("c")], 24)
    shards = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert names(tmp_path) == [*shards, INDEX]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["weight_map"] == dict(zip("abc", shards))
    assert index["metadata"]["total_size"] == sum(written.files[name] for name in shards)


def test_the_files_listed_are_all_that_lie_there(tmp_path: Path) -> None:
    folder = tmp_path / "v"
    folder.mkdir()
    copy_assets(assets(tmp_path / "assets"), folder)
    written = write_checkpoint(folder, model(), 100)
    assert written.files == {name: (folder / name).stat().st_size for name in names(folder)}
    assert "config.json" in written.files


def test_assets_are_copied_without_weights_folders_or_marks(tmp_path: Path) -> None:
    source = assets(tmp_path / "assets")
    for name in ("DONE", "manifest.json", INDEX, "pytorch_model.bin", "m.gguf", "LICENSE"):
        (source / name).write_text("x")
    (tmp_path / "to").mkdir()
    copy_assets(source, tmp_path / "to")
    assert names(tmp_path / "to") == ["LICENSE", "config.json", "tokenizer.json"]


def test_a_tensor_exported_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="b is exported twice"):
        write_checkpoint(tmp_path, [host("a"), host("b"), host("b", seed=1)], WHOLE)


def test_mem_04_the_export_is_a_stream_of_two_shards_at_a_time(tmp_path: Path) -> None:
    """When a tensor is asked for, one shard is gathered, one may still be written, those before are on disk."""

    def export() -> Any:
        for n in range(6):
            assert max(0, n - 2) <= len(names(tmp_path)) <= max(0, n - 1)
            yield host(f"w{n}")

    write_checkpoint(tmp_path, export(), 24)


def test_an_empty_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"model.safetensors is missing"):
        read(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightError, match=r"model-00002-of-00003.safetensors is missing"):
        read(tmp_path)


def test_an_index_that_names_a_tensor_nobody_holds(tmp_path: Path) -> None:
    edit_index(sharded(tmp_path), lambda rows: rows.update(ghost=rows["a"]))
    with pytest.raises(WeightError, match="ghost"):
        read(tmp_path)


def test_an_index_that_names_a_file_nobody_wrote(tmp_path: Path) -> None:
    edit_index(sharded(tmp_path), lambda rows: rows.update(ghost="model-00009-of-00003.safetensors"))
    with pytest.raises(WeightError, match=r"model-00009-of-00003.safetensors is missing"):
        read(tmp_path)


def test_a_tensor_that_the_index_does_not_know(tmp_path: Path) -> None:
    edit_index(sharded(tmp_path), lambda rows: rows.pop("c"))
    with pytest.raises(WeightError, match=r"c comes twice, or is not where"):
        read(tmp_path)


def test_a_tensor_in_another_shard_than_the_index_says(tmp_path: Path) -> None:
    edit_index(sharded(tmp_path), lambda rows: rows.update(c=rows["a"]))
    with pytest.raises(WeightError, match=r"c comes twice, or is not where"):
        read(tmp_path)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    write_file(sharded(tmp_path) / "model-00002-of-00003.safetensors", [host("a"), host("b")])
    with pytest.raises(WeightError, match=r"a comes twice, or is not where"):
        read(tmp_path)


def test_a_file_beside_the_index_is_not_read(tmp_path: Path) -> None:
    write_file(sharded(tmp_path) / "extra.safetensors", [host("e")])
    (tmp_path / SINGLE).write_bytes(b"rubbish")
    assert {t.name for t in read(tmp_path)} == set("abcd")


@pytest.mark.parametrize("place", ["../other.safetensors", "/etc/passwd", "sub/m.safetensors", ".", "..", ""])
def test_an_index_cannot_leave_the_folder(place: str, tmp_path: Path) -> None:
    folder = tmp_path / "v"
    folder.mkdir()
    write_file(tmp_path / "other.safetensors", [host("a")])
    edit_index(sharded(folder), lambda rows: rows.update(a=place))
    with pytest.raises(WeightError, match="outside the folder"):
        read(folder)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '"x"', "{}", '{"weight_map": []}', '{"weight_map": null}', '{"weight_map": {"a": 3}}',
     '{"weight_map": {"a": null}}', "\ud800".encode("utf-8", "surrogatepass"), "[" * 100_000],
)  # fmt: skip
def test_an_index_that_is_none(text: str | bytes, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(WeightError, match="index"):
        read(tmp_path)
