"""Hooks around a version's files, for stores and peer-to-peer services that this program does not know.

    --custom-update-weight-post-write-path    called with the folder of a version whose files are complete, before
                                              the version is published
    --custom-update-weight-pre-read-path      called by a reader before it reads: by an embedded engine with the
                                              version's folder; by a follower with its own folder for the version's
                                              files, before it fetches what is not there

A hook is a function of one argument, the folder as a pathlib.Path; it blocks. Promises: what a hook raises is told
as a WeightError that names the option, and fails that publish or read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from turnout.core.errors import WeightError
from turnout.core.imports import load_function

Hook = Callable[[Path], None]
POST_WRITE_FLAG = "--custom-update-weight-post-write-path"
PRE_READ_FLAG = "--custom-update-weight-pre-read-path"


def load_hook(flag: str, text: str) -> Hook:
    """A hook by its import path (turnout.core.imports); raises ConfigError."""
    function = load_function(flag, text)

    def told(folder: Path) -> None:
        try:
            function(folder)
        except Exception as fault:
            raise WeightError(f"{flag} {text} failed for {folder}: {fault!r}") from fault

    return told
