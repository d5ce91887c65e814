"""A Hugging Face checkpoint folder as a stream of HostTensors, in and out. No torch.

A folder holds `model.safetensors`, or shards and `model.safetensors.index.json`. A shard that the index names
and that is missing, a tensor that the index places elsewhere, and a name that comes twice are errors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from turnout.core.errors import WeightError
from turnout.weights.digest import root_digest, tensor_digest
from turnout.weights.host_files import HostFiles
from turnout.weights.safetensors_file import checksum, read_file, write_file
from turnout.weights.tensors import HostTensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class TensorEntry:
    """What a manifest says of one tensor. In a delta version `file` holds its change of `count` elements, from
    the state with the digest `before`; it is empty where nothing changed."""

    dtype: str
    shape: tuple[int, ...]
    digest: str
    file: str
    before: str = ""
    count: int = 0


@dataclass(frozen=True)
class Written:
    """What was written: bytes by file name, entries by tensor name, the root digest, and the blake3 of the files
    that were hashed on the way."""

    files: dict[str, int]
    tensors: dict[str, TensorEntry]
    root: str
    checksums: dict[str, str] = field(default_factory=dict)


def read_checkpoint(folder: Path) -> Iterator[HostTensor]:
    """All tensors of a checkpoint folder, as views of memory maps; raises WeightError as above."""
    placed = _index(folder)
    names = sorted(set(placed.values())) if placed is not None else [SINGLE]
    seen: set[str] = set()
    for file in names:
        if not (folder / file).is_file():
            raise WeightError(f"{folder}: {file} is missing")
        for tensor in read_file(folder / file):
            if tensor.name in seen or (placed is not None and placed.get(tensor.name) != file):
                raise WeightError(
                    f"{folder / file}: {tensor.name} comes twice, or is not where the index says"
                )
            seen.add(tensor.name)
            yield tensor
    if placed is not None and seen != set(placed):
        raise WeightError(
            f"{folder}: the index names tensors that no shard holds: {sorted(set(placed) - seen)[:5]}"
        )


def write_checkpoint(folder: Path, tensors: Iterable[HostTensor], shard_bytes: int) -> Written:
    """Writes shards of at most `shard_bytes` (a larger tensor gets its own) and the index. A shard is written
    and synced in a thread of its own while its tensors are digested and hashed and the next ones gathered: two
    shards' tensors are held at a time. Index and folder are not synced here."""
    entries: dict[str, tuple[str, tuple[int, ...], str, int]] = {}
    shard: list[HostTensor] = []
    parts: list[Path] = []
    sums: list[str] = []
    with ThreadPoolExecutor(1, "shard") as thread:
        writing: list[Future[None]] = []

        def flush() -> None:
            for job in writing:
                job.result()
            parts.append(folder / f"part-{len(parts):05d}")
            writing[:] = [thread.submit(_write_synced, parts[-1], list(shard))]
            for tensor in shard:
                digest = tensor_digest(tensor)
                entries[tensor.name] = (tensor.dtype, tensor.shape, digest, len(parts) - 1)
            sums.append(checksum(shard))
            shard.clear()

        for tensor in tensors:
            if tensor.name in entries or any(tensor.name == other.name for other in shard):
                raise WeightError(f"{tensor.name} is exported twice")
            if shard and sum(t.nbytes for t in shard) + tensor.nbytes > shard_bytes:
                flush()
            shard.append(tensor)
        flush()
        writing[0].result()
    names = (
        [SINGLE]
        if len(parts) == 1
        else [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    )
    for part, name in zip(parts, names):
        part.rename(folder / name)
    if len(parts) > 1:
        total = sum((folder / name).stat().st_size for name in names)
        weight_map = {name: names[entry[3]] for name, entry in entries.items()}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    listed = {
        name: TensorEntry(dtype, shape, digest, names[at])
        for name, (dtype, shape, digest, at) in entries.items()
    }
    root = root_digest({n: (e.dtype, e.shape, e.digest) for n, e in listed.items()})
    return Written(files, listed, root, dict(zip(names, sums)))


def _write_synced(path: Path, tensors: list[HostTensor]) -> None:
    write_file(path, tensors)
    HostFiles().sync_path(path)


def copy_assets(source: Path, target: Path) -> None:
    """Config, tokenizer and licence files of a checkpoint, everything but weights and folders."""
    for path in sorted(source.iterdir()):
        if (
            path.is_file()
            and path.suffix not in WEIGHT_SUFFIXES
            and path.name not in (INDEX, "manifest.json", "DONE")
        ):
            shutil.copyfile(path, target / path.name)


def _index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as fault:
        raise WeightError(f"{path}: not an index of weights: {fault}") from fault
    placed = rows.get("weight_map") if isinstance(rows, dict) else None
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise WeightError(f"{path}: not an index of weights: no weight_map from names to files")
    for name, file in placed.items():
        if Path(file).name != file or file in ("", ".."):
            raise WeightError(f"{path}: {name} points outside the folder: {file!r}")
    return placed
