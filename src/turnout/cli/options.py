"""What several commands read of their command lines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from turnout.core.errors import ConfigError, Fault

if TYPE_CHECKING:
    from turnout.weights.depot import Depot


def split_run_file(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """`RUN.yaml --option ...` -> the file and the rest; a command line that begins with an option has no file."""
    if argv and not argv[0].startswith("-"):
        return Path(argv[0]), list(argv[1:])
    return None, list(argv)


def token_from(variable: str | None, flag: str) -> str | None:
    """The token that the environment holds under this name; raises ConfigError where it has none."""
    if variable is None:
        return None
    found = os.environ.get(variable)
    if not found:
        raise ConfigError(Fault(flag, variable, "the environment has no such variable"))
    return found


def depot_of(store: str) -> Depot:
    """The files of a weight store: a folder, or the URL of an object store."""
    from turnout.placement.real import DiskStore
    from turnout.weights.depot import FolderDepot
    from turnout.weights.object_depot import ObjectDepot, is_url

    return ObjectDepot(store) if is_url(store) else FolderDepot(Path(store), DiskStore())
