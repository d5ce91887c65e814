"""What a path that is not there may have meant: a name like it in the same folder."""

from __future__ import annotations

import difflib
import itertools
import os
from pathlib import Path

MAX_NAMES = 2000


def near_path(text: str, otherwise: str = "check the path") -> str:
    """`did you mean PATH?` for the likeliest name beside `text`, else `otherwise`."""
    path = Path(os.path.expanduser(text))  # noqa: PTH111  pathlib's raises for an unknown user
    try:
        names = [entry.name for entry in itertools.islice(os.scandir(path.parent), MAX_NAMES)]
    except (OSError, ValueError):
        return otherwise
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {path.parent / near[0]}?" if near else otherwise
