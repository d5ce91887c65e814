"""A version is complete or refused, and `verify` finds one flipped bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.weight_files import assets, host, model
from turnout.core.errors import WeightError
from turnout.core.version import WeightVersion
from turnout.weights.checkpoint_io import SINGLE, copy_assets, write_checkpoint
from turnout.weights.manifest import (
    DONE,
    MANIFEST,
    WeightManifest,
    done_mark,
    load_manifest,
    parse_manifest,
    seal,
)
from turnout.weights.safetensors_file import write_file
from turnout.weights.verify import file_checksum, verify


@pytest.fixture
def version(tmp_path: Path) -> Path:
    folder = tmp_path / "weight_v000003"
    folder.mkdir()
    copy_assets(assets(tmp_path / "assets"), folder)
    written = write_checkpoint(folder, model(), 1 << 20)
    checksums = {name: file_checksum(folder / name) for name in written.files}
    seal(
        folder,
        WeightManifest(
            WeightVersion(1, 3, written.root),
            "full",
            3,
            "run",
            "write",
            written.files,
            written.tensors,
            checksums,
        ),
    )
    return folder


def edited(folder: Path, edit: Any) -> bytes:
    row = json.loads((folder / MANIFEST).read_bytes())
    edit(row)
    data = json.dumps(row).encode()
    (folder / MANIFEST).write_bytes(data)
    (folder / DONE).write_bytes(done_mark(data))
    return data


def test_a_manifest_comes_back_as_it_was_written(version: Path) -> None:
    manifest = load_manifest(version)
    assert parse_manifest(manifest.to_bytes(), "here") == manifest
    assert manifest.version == WeightVersion(1, 3, manifest.version.root)
    assert {name: entry.shape for name, entry in manifest.tensors.items()} == {
        t.name: t.shape for t in model()
    }
    assert verify(version) == manifest


@pytest.mark.parametrize("name", [DONE, MANIFEST, SINGLE, "config.json"])
def test_whatever_is_missing_is_named(version: Path, name: str) -> None:
    (version / name).unlink()
    with pytest.raises(WeightError, match=f"{name} is missing"):
        load_manifest(version)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="no such folder"):
        load_manifest(tmp_path / "weight_v000009")


def test_a_truncated_file_is_refused_by_its_size(version: Path) -> None:
    data = (version / SINGLE).read_bytes()
    (version / SINGLE).write_bytes(data[:-1])
    with pytest.raises(
        WeightError, match=rf"{SINGLE} has {len(data) - 1} bytes, the manifest says {len(data)}"
    ):
        load_manifest(version)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda row: row.update(format_version=3), "format 'turnout-weights' version 3"),
        (lambda row: row.update(format="other"), "format 'other'"),
        (lambda row: row.pop("format"), "not a manifest"),
        (lambda row: row.pop("version"), "not a manifest"),
        (lambda row: row.pop("files"), "not a manifest"),
        (lambda row: row.pop("write_id"), "not a manifest"),
        (lambda row: row.update(more=1), "not a manifest"),
        (lambda row: row.update(version={"counter": 1}), "not a manifest"),
        (lambda row: row.update(version=None), "not a manifest"),
        (lambda row: row.update(tensors=[]), "not a manifest"),
        (lambda row: row.update(tensors={"a": 1}), "not a manifest"),
        (lambda row: row.update(files=[]), "not a manifest"),
        (lambda row: row.update(files=None), "not a manifest"),
        (lambda row: row["files"].update({"../other": 1}), "not a manifest: file"),
        (lambda row: row["files"].update({"big": "1"}), "not a manifest: file"),
        (lambda row: row.update(kind="part"), "kind 'part'"),
        (lambda row: row.update(kind="delta"), "a delta, and nothing else, has a base"),
    ],
)
def test_a_manifest_of_another_form_is_refused(version: Path, edit: Any, says: str) -> None:
    edited(version, edit)
    with pytest.raises(WeightError, match=says):
        load_manifest(version)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"3", b"\xff\xfe", b"[" * 100_000])
def test_bytes_that_are_no_manifest(data: bytes) -> None:
    with pytest.raises(WeightError, match=r"^here: not a manifest"):
        parse_manifest(data, "here")


def test_verify_finds_any_flipped_bit_of_the_weights(version: Path) -> None:
    whole = (version / SINGLE).read_bytes()
    data_at = 8 + int.from_bytes(whole[:8], "little")
    for at in (data_at, (data_at + len(whole)) // 2, len(whole) - 1):
        for bit in (0, 7):
            broken = bytearray(whole)
            broken[at] ^= 1 << bit
            (version / SINGLE).write_bytes(broken)
            load_manifest(version)  # sizes are right: only the digest can tell
            with pytest.raises(WeightError, match=f"{SINGLE}: the bytes are not those"):
                verify(version)


def test_ten_thousand_flipped_bits_are_all_found(version: Path) -> None:
    """Every bit of every file counts: weights, config, tokenizer, manifest and DONE itself."""
    rng = np.random.default_rng(5)
    whole = {path: path.read_bytes() for path in sorted(version.iterdir())}
    assert {DONE, MANIFEST, SINGLE, "config.json", "tokenizer.json"} == {path.name for path in whole}
    paths = list(whole)
    for draw in range(10_000):
        path = paths[draw % len(paths)]  # as many in the smallest file as in the largest
        broken = bytearray(whole[path])
        broken[int(rng.integers(len(broken)))] ^= 1 << int(rng.integers(8))
        with path.open("r+b") as file:
            file.write(broken)
        with pytest.raises(WeightError, match=f"{version}.*"):
            verify(version)
        with path.open("r+b") as file:
            file.write(whole[path])
    verify(version)


@pytest.mark.parametrize("field", ["dtype", "shape", "digest"])
def test_verify_compares_every_field(version: Path, field: str) -> None:
    other = {"dtype": "F16", "shape": [4, 16], "digest": "0" * 32}[field]
    edited(version, lambda row: row["tensors"]["head"].update({field: other}))
    with pytest.raises(WeightError, match="head is not what the manifest says"):
        verify(version)


def test_verify_compares_the_root(version: Path) -> None:
    edited(version, lambda row: row["version"].update(root="0" * 32))
    with pytest.raises(WeightError, match="root digest"):
        verify(version)


@pytest.mark.parametrize("tensors", [model()[:-1], [*model(), host("more")]])
def test_verify_needs_exactly_the_tensors_of_the_manifest(version: Path, tensors: list[Any]) -> None:
    size = write_file(version / SINGLE, tensors)
    edited(version, lambda row: row["files"].update({SINGLE: size}))
    with pytest.raises(WeightError):
        verify(version)
