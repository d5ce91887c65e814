"""The files of a delta version: encoded changes in safetensors files, one entry per tensor.

    delta-00000.safetensors    U8 entries: "__shared__" (tables of the encoding; may be absent), then one for each
                               changed tensor under the tensor's own name

Files of one version are independent of one another, so that several ranks can write one each. Sizes, digests
before and after, and counts stand in the manifest (turnout.weights.manifest).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from turnout.core.errors import WeightError
from turnout.weights.changes import Bits, Change
from turnout.weights.checkpoint_io import TensorEntry, Written
from turnout.weights.codecs.codec import Head
from turnout.weights.codecs.registry import codec
from turnout.weights.digest import root_digest
from turnout.weights.manifest import WeightManifest
from turnout.weights.safetensors_file import read_file, write_file
from turnout.weights.tensors import HostTensor

SHARED = "__shared__"


@dataclass(frozen=True)
class TensorDelta:
    """One tensor of a version: its change (of no element, where it stayed), the bits [elements] it is relative
    to, and its digests."""

    change: Change
    base: Bits
    before: str
    after: str


def write_delta(folder: Path, deltas: Iterable[TensorDelta], encoding: str, bucket_bytes: int) -> Written:
    """Writes the changes of a version, the tensors of at most `bucket_bytes` (of full values) to a file; nothing
    is synced here. `deltas` has every tensor of the version once."""
    encode = codec(encoding)
    tensors: dict[str, TensorEntry] = {}
    files: dict[str, int] = {}
    held: list[TensorDelta] = []

    def flush() -> None:
        if not held:
            return
        name = f"delta-{len(files):05d}.safetensors"
        encoded = encode.encode([(delta.change, delta.base) for delta in held])
        blobs = [(delta.change.name, part) for delta, part in zip(held, encoded.parts)]
        if encoded.shared.size:
            blobs.insert(0, (SHARED, encoded.shared))
        files[name] = write_file(folder / name, [HostTensor(n, "U8", (b.size,), b) for n, b in blobs])
        held.clear()

    for delta in deltas:
        change = delta.change
        if change.name in tensors or change.name == SHARED:
            raise WeightError(f"{change.name} is exported twice, or has a reserved name")
        if sum(d.base.nbytes for d in held) + delta.base.nbytes > bucket_bytes:
            flush()
        file = f"delta-{len(files):05d}.safetensors" if change.count else ""
        tensors[change.name] = TensorEntry(
            change.dtype, change.shape, delta.after, file, delta.before, change.count
        )
        if change.count:
            held.append(delta)
    flush()
    return Written(files, tensors, root_digest({n: (e.dtype, e.shape, e.digest) for n, e in tensors.items()}))


def read_delta(folder: Path, manifest: WeightManifest, base: Callable[[str], Bits]) -> Iterator[Change]:
    """The changes of a delta version, one tensor at a time, in file order; `base` gives a tensor's bits
    [elements] before the change and is called where the encoding needs them. Raises WeightError for bytes that
    cannot be what the manifest says; that they are the right ones is what the digests tell."""
    encoding = codec(manifest.encoding)
    placed = {name: entry for name, entry in manifest.tensors.items() if entry.count}
    seen: set[str] = set()
    for file in sorted({entry.file for entry in placed.values()}):
        decode = None
        for blob in read_file(folder / file):
            if blob.name == SHARED:
                decode = encoding.decoder(blob.bits.view(np.uint8))
                continue
            entry = placed.get(blob.name)
            if entry is None or entry.file != file or blob.name in seen:
                raise WeightError(f"{folder / file}: {blob.name} is not where the manifest says")
            seen.add(blob.name)
            decode = decode if decode is not None else encoding.decoder(np.zeros(0, np.uint8))
            head = Head(blob.name, entry.dtype, entry.shape, entry.count)
            yield decode(blob.bits.view(np.uint8), head, base(blob.name) if encoding.needs_base else None)
    if seen != set(placed):
        raise WeightError(f"{folder}: no file holds {sorted(set(placed) - seen)[:5]}")
