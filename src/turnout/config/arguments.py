"""Reading the command line: a list of arguments -> values by YAML key, and every fault found.

Owns the grammar: `--name value`, `--name=value`, `--switch`, `--no-switch`, `--list a b c`, JSON for mappings,
and `--no-name`, which makes an option "not given" again where a file gave it. `--router-NAME` and `--sglang-NAME`
that are no options are entries of --router-args and --sglang-args. A flag that stands twice counts
the last time, as everywhere. Names are never shortened. Promises: it reads on after a fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from turnout.config.option import OptionSpec
from turnout.config.reasons import shown
from turnout.config.refusals import entry_of, unknown_name
from turnout.core.errors import Fault

MAX_DIGITS = 100

_INT = re.compile(r"[-+]?[0-9]+")
_WORDS = {"true": True, "false": False}


@dataclass
class ArgumentValues:
    """What the command line gives, by YAML key; `inside`: entries of options that are mappings. `refused` are
    options whose value could not be read."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    inside: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    refused: set[str] = field(default_factory=set[str])
    faults: list[Fault] = field(default_factory=list[Fault])


def read_arguments(argv: list[str], specs: dict[str, OptionSpec]) -> ArgumentValues:
    """Reads all of `argv`; never raises."""
    found = ArgumentValues()
    index = 0
    while index < len(argv):
        word = argv[index]
        index += 1
        if not word.startswith("--") or word == "--":
            found.faults.append(Fault(shown(word), "", "belongs to no option", "options begin with `--`"))
            continue
        flag, equals, given = word.partition("=")
        spec, negated = _find(flag, specs)
        following = _following(argv, index, spec, negated or bool(equals))
        index += len(following)
        texts = [given] if equals else following
        if spec is None:
            name = flag[2:].replace("-", "_")
            entry = entry_of(name, specs) if "_" not in flag else None
            if entry is None:
                found.faults.append(unknown_name(shown(flag), name, _joined(texts), specs))
            else:
                found.inside.setdefault(entry[0], {})[entry[1]] = _loose(texts)
        else:
            _take(found, spec, texts, negated)
    return found


def _find(flag: str, specs: dict[str, OptionSpec]) -> tuple[OptionSpec | None, bool]:
    """The option that a flag names, and whether it is the `--no-` form. Underscores are not a flag's spelling."""
    if "_" in flag:
        return None, False
    name = flag[2:].replace("-", "_")
    if name in specs:
        return specs[name], False
    positive = specs.get(name.removeprefix("no_")) if name.startswith("no_") else None
    if positive is not None and (positive.kind == "bool" or positive.nullable):
        return positive, True
    return None, False


def _following(argv: list[str], index: int, spec: OptionSpec | None, closed: bool) -> list[str]:
    """The arguments after a flag that are its values. An unknown flag takes all of them, to be told once."""
    if closed or (spec is not None and spec.kind == "bool"):
        return []
    rest = argv[index:]
    count = next((at for at, word in enumerate(rest) if word.startswith("--")), len(rest))
    return rest[: count if spec is None or spec.kind in ("ints", "strs") else min(count, 1)]


def _take(found: ArgumentValues, spec: OptionSpec, texts: list[str], negated: bool) -> None:
    if negated:
        flag = "--no-" + spec.flag[2:]
        if texts:
            found.faults.append(Fault(flag, shown(texts[0]), "takes no value", f"write {flag} alone"))
            found.refused.add(spec.name)
            return
        found.values[spec.name] = False if spec.kind == "bool" else None
        return
    try:
        found.values[spec.name] = _parse(spec, texts)
        found.refused.discard(spec.name)
    except ValueError as error:
        found.faults.append(Fault(spec.flag, _joined(texts), str(error), f"give {_expected(spec)}"))
        found.refused.add(spec.name)


def _joined(texts: list[str]) -> str:
    return shown(" ".join(texts)) if texts else ""


def _expected(spec: OptionSpec) -> str:
    if spec.kind == "bool":
        return f"{spec.flag}, --no-{spec.flag[2:]}, or =true or =false"
    return f"{spec.flag} {spec.value_text}"


def _parse(spec: OptionSpec, texts: list[str]) -> Any:
    if spec.kind == "bool":
        return _switch(texts)
    if spec.kind == "ints":
        return [_whole(text) for text in texts]
    if spec.kind == "strs":
        return list(texts)
    if not texts:
        raise ValueError("a value is missing")
    return _SCALARS[spec.kind](texts[0])


def _loose(texts: list[str]) -> Any:
    """The value of an argument of another program: a switch, several words, else what JSON makes of it, or text."""
    if len(texts) != 1:
        return texts or True
    try:
        return json.loads(texts[0])
    except ValueError:
        return texts[0]


def _switch(texts: list[str]) -> bool:
    if not texts:
        return True
    if texts[0] not in _WORDS:
        raise ValueError("a switch is true or false")
    return _WORDS[texts[0]]


def _whole(text: str) -> int:
    if not _INT.fullmatch(text):
        raise ValueError("must be a whole number")
    if len(text) > MAX_DIGITS:
        raise ValueError(f"has more than {MAX_DIGITS} digits")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("must be a number") from None


def _mapping(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from None


_SCALARS: dict[str, Callable[[str], Any]] = {
    "int": _whole,
    "float": _number,
    "str": str,
    "choice": str,
    "json": _mapping,
}
