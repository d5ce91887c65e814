"""The files of a folder probe (`POST /probe_folder`), as both sides know them: named by a nonce, holding a
nonce."""

from __future__ import annotations

import re
from pathlib import Path

NONCE = re.compile(r"[0-9a-f]{32}")


def probe_file(folder: Path, nonce: str) -> Path:
    """The file that a nonce names; no store takes it for a version."""
    return folder / f".turnout-probe-{nonce}"
