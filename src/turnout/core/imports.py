"""A user's function by its import path.

`module:function`, `module.function` or `path/to/file.py:function`. Modules are looked for as Python does, and in
the working directory. Promises: whatever a module raises while it loads is told as a ConfigError that names the
option.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from turnout.core.errors import ConfigError, Fault


def load_function(flag: str, text: str) -> Callable[..., Any]:
    """The function that an option names; raises ConfigError with what is wrong."""
    place, _, name = text.rpartition(":") if ":" in text else text.rpartition(".")
    if not place or not name:
        raise ConfigError(
            Fault(flag, text, "names no function", "write module:function or path/to/file.py:function")
        )
    module = _module(flag, text, place)
    function = getattr(module, name, None)
    if not callable(function):
        near = difflib.get_close_matches(name, [found for found in dir(module) if found[0] != "_"], n=1)
        remedy = f"did you mean {near[0]}?" if near else ""
        raise ConfigError(Fault(flag, text, f"{place} has no function {name!r}", remedy))
    return function


def _module(flag: str, text: str, place: str) -> ModuleType:
    try:
        if place.endswith(".py"):
            return _module_of_file(Path(place).expanduser())
        here = os.getcwd()  # noqa: PTH109 - as sys.path holds it
        if here not in sys.path:
            sys.path.append(here)
        return importlib.import_module(place)
    except Exception as fault:  # a user's module may raise anything while it loads
        reason = f"{place} cannot be imported: {type(fault).__name__}: {fault}"
        raise ConfigError(Fault(flag, text, reason)) from fault


def _module_of_file(path: Path) -> ModuleType:
    name = f"turnout_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
