"""From a run's file and command line to a checked `RunConfig`, and back to a file.

Order: defaults, then the file, then the command line; checks come after all of them. Promises: `load` raises one
ConfigError with every fault of every kind, or returns a RunConfig without any; `load(dump(config))` is equal to
`config` but for the run directory, which is a place and not a part of what is run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from turnout.config.arguments import ArgumentValues, read_arguments
from turnout.config.check_files import exists
from turnout.config.checks import Known, check_all
from turnout.config.file import FileValues, read_file
from turnout.config.reasons import fault_of, shown
from turnout.config.refusals import entry_of, unknown_name
from turnout.config.run_config import RunConfig, specs
from turnout.config.slime import translated
from turnout.core.errors import ConfigError, Fault

log = logging.getLogger(__name__)


def load(path: Path | None, argv: Sequence[str] = ()) -> RunConfig:
    """Reads `path` (YAML or JSON; None for no file) and then `argv`. Raises ConfigError with all faults."""
    found_file = FileValues() if path is None else read_file(path)
    given = translated(argv)
    found_argv = read_arguments(given.words, specs())
    faults = [*found_file.faults, *_unknown_keys(found_file), *found_argv.faults]
    values = _merged(path, found_file, found_argv)
    where = {name: _where(name, found_file, found_argv) for name in specs()}
    config, invalid = _validate(values, found_argv.refused, where, faults)
    known = {name: value for name, value in _with_defaults(values).items() if name not in invalid}
    faults.extend(check_all(Known(known), where))
    if faults or config is None:
        raise ConfigError([_from_its_folder(fault, path) for fault in faults])
    for line in given.told():
        log.warning(line)
    return config


def dump(config: RunConfig) -> str:
    """The configuration as JSON text for `config.json` in the run directory: every option, "not given" as null."""
    values = config.model_dump(mode="json") | {"run_dir": None}
    ordered = {name: values[name] for name in specs()}
    return json.dumps(ordered, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _merged(path: Path | None, file: FileValues, argv: ArgumentValues) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, spec in specs().items():
        if name in argv.values:
            values[name] = argv.values[name]
        elif name in file.values:
            given = file.values[name]
            alone = spec.kind in ("ints", "strs") and isinstance(given, str | int) and given is not True
            values[name] = [given] if alone and given is not False else given
    for name, more in (*_entries(file).items(), *argv.inside.items()):
        if isinstance(values.get(name, {}), dict):
            values[name] = {**values.get(name, {}), **more}
    if values.get("run_name") is None and "run_name" not in argv.refused:
        values["run_name"] = "run" if path is None else path.stem
    return values


def _entries(file: FileValues) -> dict[str, dict[str, Any]]:
    """Keys of a file that are entries of options which are mappings, by that option."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in file.values.items():
        entry = entry_of(key, specs()) if key not in specs() else None
        if entry is not None:
            found.setdefault(entry[0], {})[entry[1]] = value
    return found


def _unknown_keys(file: FileValues) -> list[Fault]:
    return [
        unknown_name(file.place(key), key, f"{key}: {shown(value)}", specs())
        for key, value in file.values.items()
        if key not in specs() and entry_of(key, specs()) is None
    ]


def _where(name: str, file: FileValues, argv: ArgumentValues) -> str:
    flag = specs()[name].flag
    if name in file.values and name not in argv.values:
        return f"{flag} ({file.place(name)})"
    return flag


def _from_its_folder(fault: Fault, path: Path | None) -> Fault:
    """A file that lies beside the run's own, as of a folder that was not entered, is told as that."""
    place = fault.value.partition("@[")[0]
    if path is None or not place or not fault.reason.startswith("no such f"):
        return fault
    if not exists(f"{path.parent}/{place}"):
        return fault
    remedy = f"paths are relative to the folder in which the command is given: cd {path.parent}"
    return replace(fault, remedy=remedy)


def _validate(
    values: dict[str, Any], refused: set[str], where: dict[str, str], faults: list[Fault]
) -> tuple[RunConfig | None, set[str]]:
    """The configuration, or None with the names of the options whose values are no good; adds their faults."""
    try:
        return RunConfig.model_validate(values), set(refused)
    except ValidationError as error:
        details = error.errors(include_url=False)
    invalid = set(refused)
    for detail in details:
        name = str(detail["loc"][0])
        if name in refused:  # its text could not be read, which has been told
            continue
        invalid.add(name)
        faults.append(fault_of(detail, specs()[name], where[name]))
    return None, invalid


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    defaults = {name: spec.default for name, spec in specs().items() if not spec.required}
    return defaults | values
