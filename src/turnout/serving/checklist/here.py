"""What this machine tells: the checkpoint, the folder of versions, devices, proxies, the SGLang that would be
started.

Promises: nothing stays that was not there; nothing of torch or CUDA is loaded.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from turnout.core.errors import WeightError
from turnout.placement.processes import PROXY_VARIABLES
from turnout.protocol.folder_probe import probe_file
from turnout.serving.checklist.facts import ModelFacts, StoreFacts
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.digest import root_of

DIGESTED_BYTES = 16 << 30  # more is read with --deep only


def model_facts(folder: Path, deep: bool) -> ModelFacts:
    """Sizes from the headers of all files; the digest from all bytes, of a large checkpoint with `deep` only."""
    try:
        tensors = list(read_checkpoint(folder))
    except (WeightError, OSError) as fault:
        return ModelFacts(folder, str(fault))
    elements, size = sum(math.prod(t.shape) for t in tensors), sum(t.nbytes for t in tensors)
    root, why = "", f"{size} bytes; --deep reads them"
    if deep or size <= DIGESTED_BYTES:
        root, why = root_of(tensors), ""
    return ModelFacts(folder, why, elements, _stored_dtype(folder), root)


def _stored_dtype(folder: Path) -> str:
    """The dtype that config.json names, under its new or its old key; empty where it names none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    found = config.get("dtype", config.get("torch_dtype"))
    return found if isinstance(found, str) else ""


@contextlib.contextmanager
def store_facts(folder: Path) -> Iterator[StoreFacts]:
    """Writes and removes a file. The folder is there inside the block, where it can be made at all; what was
    made of it is removed afterwards, if nothing came into it."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = probe_file(folder, secrets.token_hex(16))
        probe.write_bytes(b"")
        probe.unlink()
        fault = ""
    except OSError as error:
        fault = f"can't be written to: {error.strerror}"
    try:
        yield StoreFacts(folder, fault, _free_bytes(folder))
    finally:
        with contextlib.suppress(OSError):
            for path in made:
                path.rmdir()


def _free_bytes(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def proxies(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the proxy variables that are set."""
    return tuple(
        sorted(name for name in environment if name.lower() in PROXY_VARIABLES and environment[name])
    )
