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

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

from turnout.core.errors import ConfigError, Fault, WeightError

Hook = Callable[[Path], None]
POST_WRITE_FLAG = "--custom-update-weight-post-write-path"
PRE_READ_FLAG = "--custom-update-weight-pre-read-path"


def load_hook(flag: str, text: str) -> Hook:
    """`module:function`, `module.function` or `path/to/file.py:function`; raises ConfigError."""
    place, _, name = text.rpartition(":") if ":" in text else text.rpartition(".")
    try:
        function = getattr(_module(place), name, None)
    except (ImportError, OSError, SyntaxError, ValueError) as fault:
        raise ConfigError(Fault(flag, text, f"{place} cannot be imported: {fault}")) from fault
    if not callable(function):
        raise ConfigError(Fault(flag, text, f"{place} has no function {name!r}"))

    def told(folder: Path) -> None:
        try:
            function(folder)
        except Exception as fault:
            raise WeightError(f"{flag} {text} failed for {folder}: {fault!r}") from fault

    return told


def _module(place: str) -> object:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(
        f"turnout_hook_{Path(place).stem}", Path(place).expanduser()
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no module can be made of {place}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
