"""The run that a command line names, or the nearest there are. Reads directories only; imports next to nothing."""

from __future__ import annotations

import difflib
import glob
import itertools
import os
from pathlib import Path

from turnout.core.errors import ConfigError, Fault

RECORD = "run.json"  # a directory with this file holds a run
MAX_RUNS = 1000


def find_run(text: str, base: Path = Path("runs")) -> Path:
    """The directory of a run that a command line names: as it stands, or the name of a run in `base`, with its
    number or without (the newest of that name then). Raises ConfigError with the nearest there are."""
    folder = Path(os.path.expanduser(text))  # noqa: PTH111  pathlib's raises for an unknown user
    if (folder / RECORD).is_file():
        return folder
    if folder.exists() and (folder.parent / RECORD).is_file():
        return folder.parent
    if folder.parent == Path() and not folder.exists():
        named = [base / text, *sorted(base.glob(f"{glob.escape(text)}-[0-9][0-9][0-9]"), reverse=True)]
        found = next((place for place in named if (place / RECORD).is_file()), None)
        if found is not None:
            return found
    reason = "holds no run" if folder.is_dir() else "there is no such folder"
    raise ConfigError(Fault("RUN_DIR", text, reason, _nearest_run(folder, base)))


def _nearest_run(folder: Path, base: Path) -> str:
    """What to say instead: runs in it, beside it or in `base`, the likeliest first."""
    for parent in dict.fromkeys((folder, folder.parent, base)):
        runs = [place.parent for place in itertools.islice(parent.glob(f"*/{RECORD}"), MAX_RUNS)]
        by_name = {str(place): place for place in runs}
        near = difflib.get_close_matches(str(folder), by_name, n=2)
        if near or runs:
            newest = max(runs, key=lambda place: place.stat().st_mtime)
            return f"did you mean {' or '.join(near or [str(newest)])}?"
    return "give the directory of one: `turnout train` tells it in its first line"
