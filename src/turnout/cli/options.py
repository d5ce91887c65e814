"""Splitting a command line of `turnout train` into the run's file and the options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def split_run_file(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """`RUN.yaml --option ...` -> the file and the rest; a command line that begins with an option has no file."""
    if argv and not argv[0].startswith("-"):
        return Path(argv[0]), list(argv[1:])
    return None, list(argv)
