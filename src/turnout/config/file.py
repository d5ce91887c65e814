"""Reading a configuration file: YAML (or JSON) text -> the values of its top level with the line of each.

Owns the YAML dialect. Promises: `1e-5` is a number and `on`, `yes`, `1:30` and dates are texts (YAML 1.2's core
schema; PyYAML's own rules are of 1.1); a key that stands twice is a fault, at any depth; an explicit null is a
value, different from a missing key. Aliases are refused: a few lines of them can mean billions of values, or a
list that contains itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from turnout.config.near import near_path
from turnout.core.errors import ConfigError, Fault

MAX_BYTES = 1 << 20

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)


@dataclass(frozen=True)
class FileValues:
    """What a file gives: `values` by key as written, `lines` (1 is the first) where known, faults of its form."""

    name: str = ""
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    lines: dict[str, int] = field(default_factory=dict[str, int])
    faults: tuple[Fault, ...] = ()

    def place(self, key: str) -> str:
        """`run.yaml:3`, or the name alone where the line isn't known."""
        return f"{self.name}:{self.lines[key]}" if key in self.lines else self.name


def read_file(path: Path) -> FileValues:
    """Reads a .yaml, .yml or .json file. Raises ConfigError where it can't be read at all; faults of single
    keys are in the result, so that they are told together with all others."""
    if path.is_dir():
        inside = next((path / name for name in ("run.yaml", "config.json") if (path / name).is_file()), None)
        remedy = "give the run's file" if inside is None else f"did you mean {inside}?"
        raise ConfigError(Fault(str(path), "", "is a folder", remedy))
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(Fault(str(path), "", "not a .yaml, .yml or .json file", "give the run's file"))
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(Fault(str(path), "", f"larger than {MAX_BYTES} bytes", "is it the right file?"))
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        remedy = near_path(str(path)) if isinstance(error, FileNotFoundError) else "check the path"
        raise ConfigError(Fault(str(path), "", f"can't be read: {reason}", remedy)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            Fault(str(path), "", f"not UTF-8 at byte {error.start}", "save it as UTF-8")
        ) from None
    return _read_json(path, text) if path.suffix == ".json" else _read_yaml(path, text)


def _read_json(path: Path, text: str) -> FileValues:
    twice: list[Fault] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                twice.append(Fault(path.name, key, "the key stands twice", "keep one of them"))
            seen[key] = value
        return seen

    try:
        content = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise _malformed(f"{path}:{error.lineno}", f"not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, nesting without end
        raise _malformed(str(path), f"not JSON: {error}") from None
    if not isinstance(content, dict):
        raise _no_mapping(path)
    return FileValues(path.name, cast("dict[str, Any]", content), {}, tuple(twice))


def _read_yaml(path: Path, text: str) -> FileValues:
    import yaml  # noqa: PLC0415  late: 40 ms that `turnout --help` need not pay

    loader = _core_schema_loader()(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return FileValues(path.name)
        if not isinstance(root, yaml.MappingNode):
            raise _no_mapping(path)
        faults = tuple(_twice(path.name, root))
        lines = {str(key.value): key.start_mark.line + 1 for key, _ in root.value}
        content = cast("dict[object, Any]", loader.construct_document(root))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or str(error)
        raise _malformed(place, f"not YAML: {problem}") from None
    except (ValueError, RecursionError) as error:
        raise _malformed(str(path), f"not YAML: {error}") from None
    finally:
        loader.dispose()
    bad = tuple(
        Fault(path.name, str(key), "a key must be text", "put the name of an option")
        for key in content
        if not isinstance(key, str)
    )
    values = {key: value for key, value in content.items() if isinstance(key, str)}
    return FileValues(path.name, values, lines, faults + bad)


def _twice(name: str, root: Any) -> list[Fault]:
    """A fault for every key that stands twice in its mapping."""
    import yaml  # noqa: PLC0415

    faults: list[Fault] = []
    todo: list[Any] = [root]
    while todo:
        node = todo.pop()
        if isinstance(node, yaml.SequenceNode):
            todo.extend(node.value)
        if not isinstance(node, yaml.MappingNode):
            continue
        first: dict[str, int] = {}
        for key, value in node.value:
            todo.append(value)
            label, line = str(key.value), key.start_mark.line + 1
            if label in first:
                reason = f"the key stands twice, first in line {first[label]}"
                faults.append(Fault(f"{name}:{line}", label, reason, "keep one of them"))
            first.setdefault(label, line)
    return faults


def _core_schema_loader() -> Any:
    """PyYAML's safe loader with the scalars of YAML 1.2's core schema."""
    import yaml  # noqa: PLC0415

    class CoreLoader(yaml.SafeLoader):
        yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  the class attribute PyYAML itself uses

        def compose_node(self, parent: Any, index: Any) -> Any:
            composer: Any = self  # PyYAML has no types
            if composer.check_event(yaml.AliasEvent):
                mark = composer.peek_event().start_mark
                raise yaml.MarkedYAMLError(problem="aliases are not supported here", problem_mark=mark)
            return cast("Any", super()).compose_node(parent, index)

        def construct_yaml_int(self, node: Any) -> int:
            return int(self.construct_scalar(node))  # 012 is twelve, not octal

    add_resolver = cast("Callable[[str, re.Pattern[str], list[str]], None]", CoreLoader.add_implicit_resolver)
    for tag, pattern, first in (
        ("null", _NULL, ["~", "n", "N", ""]),
        ("bool", _BOOL, list("tTfF")),
        ("int", _INT, list("-+0123456789")),
        ("float", _FLOAT, list("-+0123456789.")),
    ):
        whole = re.compile(rf"^(?:{pattern.pattern})$")
        add_resolver(f"tag:yaml.org,2002:{tag}", whole, first)
    CoreLoader.add_constructor("tag:yaml.org,2002:int", CoreLoader.construct_yaml_int)
    return CoreLoader


def _malformed(place: str, reason: str) -> ConfigError:
    return ConfigError(Fault(place, "", reason, "mend the file"))


def _no_mapping(path: Path) -> ConfigError:
    return ConfigError(Fault(str(path), "", "the file is no mapping", "write lines of `option: value`"))
