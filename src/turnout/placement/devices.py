"""The GPUs of this machine, as far as it can be told without a library of theirs."""

from __future__ import annotations

import os
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(dev: Path = Path("/dev")) -> int | None:
    """How many NVIDIA GPUs a process of this one's environment sees: those that CUDA_VISIBLE_DEVICES names (up to
    the first that is no name, as CUDA reads it), else those whose device files are there. None where there are
    none: other GPUs are not known here."""
    named = os.environ.get(VISIBLE)
    if named is not None:
        names = [name.strip() for name in named.split(",")]
        return next((at for at, name in enumerate(names) if not name or name.startswith("-")), len(names))
    found = sum(path.name[len("nvidia") :].isdecimal() for path in dev.glob("nvidia*"))
    return found or None
