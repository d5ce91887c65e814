"""Models that this program makes, kept under $XDG_CACHE_HOME/turnout/models (default ~/.cache).

Owns that folder. An entry is <key>/checkpoint with the files and <key>/files.json with their sizes and
SHA-256. Promises: an entry appears whole or not at all, parallel makers cannot harm one another, and an entry
whose files are damaged is made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from turnout.core.errors import Fault, ModelError

log = logging.getLogger(__name__)
Build = Callable[[Path], None]


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "turnout" / "models"


def existing(key: str) -> Path | None:
    """The checkpoint folder of an entry that is there and whole."""
    entry = cache_folder() / key
    return entry / "checkpoint" if entry.exists() and damage(entry) is None else None


def cached(key: str, build: Build) -> Path:
    """The checkpoint folder of an entry, built where it is absent or damaged. `build` fills an empty folder."""
    entry = cache_folder() / key
    if entry.exists():
        fault = damage(entry)
        if fault is None:
            return entry / "checkpoint"
        log.warning("%s is damaged (%s) and is made again", entry, fault)
    entry.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{key}-", dir=entry.parent) as stage:
        fresh = Path(stage) / "new"
        (fresh / "checkpoint").mkdir(parents=True)
        build(fresh / "checkpoint")
        sums = {str(p.relative_to(fresh)): _sum(p) for p in sorted(fresh.rglob("*")) if p.is_file()}
        (fresh / "files.json").write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")
        if entry.exists() and damage(entry) is not None:
            entry.rename(Path(stage) / "old")
        try:
            fresh.rename(entry)
        except OSError:
            if damage(entry) is not None:  # not just another maker that was faster
                raise
    return entry / "checkpoint"


def damage(entry: Path) -> str | None:
    """What is wrong with an entry, None where every file is as it was made."""
    try:
        sums: dict[str, str] = json.loads((entry / "files.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        return f"no readable list of files: {fault}"
    for name, expected in sums.items():
        path = entry / name
        if not path.is_file() or _sum(path) != expected:
            return f"{name} is missing or changed"
    return None


def place(target: Path, build: Build) -> Path:
    """`build` into a folder beside `target`, then renamed; ModelError where `target` already holds files."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(
            Fault(str(target), "", "is not an empty folder", "remove it, or name another folder")
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as stage:
        fresh = Path(stage) / "new"
        fresh.mkdir()
        build(fresh)
        fresh.rename(target)
    return target


def copy_of(source: Path) -> Build:
    """A build that copies the files of a checkpoint folder."""

    def build(folder: Path) -> None:
        shutil.copytree(source, folder, dirs_exist_ok=True)

    return build


def _sum(path: Path) -> str:
    with path.open("rb") as stream:
        return f"{path.stat().st_size} {hashlib.file_digest(stream, 'sha256').hexdigest()}"
