"""How an option is declared, and what is derived from its declaration.

Owns: `option()`, which every group uses for every option, and `OptionSpec`, the reading of a declaration that
the command line, the help text and the reference page share. Promises: nothing about an option stands in a
second place. A group is a strict, frozen pydantic class with a `title`.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

Kind = Literal["int", "float", "bool", "str", "choice", "ints", "strs", "json"]

PATH = r"^[^\x00]+$"  # what every option that is a path has as its pattern

_SCALARS: dict[object, Kind] = {int: "int", float: "float", bool: "bool", str: "str"}
_BOUNDS = {"Ge": ("ge", ">="), "Gt": ("gt", ">"), "Le": ("le", "<="), "Lt": ("lt", "<")}


class Options(BaseModel):
    """Base of every group. Strict: text is no number, a number is no switch; unknown names are errors.

    The validator is built at first use: groups never need one, and `--help` needs none at all."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)
    title: ClassVar[str] = ""


def option(default: Any, text: str, *, unit: str = "", unset: str = "", **checks: Any) -> Any:
    """Declares one option. `default` is `...` where there is none; `text` says what it does; `unit` is the unit
    of its value; `unset` says what holds when the value is none. `checks` are pydantic's own (ge, gt, pattern).
    A list or mapping as default is copied for each configuration."""
    declare = cast("Callable[..., Any]", Field)  # its overloads don't take checks that are passed on
    return declare(default, description=text, json_schema_extra={"unit": unit, "unset": unset}, **checks)


@dataclass(frozen=True)
class OptionSpec:
    """One option as read from its declaration. `name` is the YAML key; `default` is None where it is required."""

    name: str
    group: str
    kind: Kind
    text: str
    unit: str
    unset: str
    required: bool
    default: Any
    nullable: bool
    choices: tuple[str, ...]
    bounds: tuple[str, ...]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def default_text(self) -> str:
        """The default as the help shows it."""
        if self.required:
            return "required"
        if self.default is None:
            return self.unset or "not given"
        if self.kind in ("ints", "strs", "json"):
            return json.dumps(self.default) if self.default else "none"
        return str(self.default).lower() if self.kind == "bool" else str(self.default)

    @property
    def value_text(self) -> str:
        """What may stand after the flag."""
        if self.kind == "choice":
            return "|".join(self.choices)
        shown = {"bool": "", "int": "N", "float": "X", "str": "TEXT", "ints": "N ...", "strs": "TEXT ..."}
        return " ".join([shown.get(self.kind, "JSON"), *self.bounds]).strip()


def read_specs(groups: tuple[type[Options], ...]) -> tuple[OptionSpec, ...]:
    """All options of the groups, in the order of declaration."""
    return tuple(
        _read(name, group.title, field) for group in groups for name, field in group.model_fields.items()
    )


def _read(name: str, group: str, field: FieldInfo) -> OptionSpec:
    inner, nullable = _without_none(field.annotation)
    kind, choices = _kind(name, inner)
    extra = cast("dict[str, str]", field.json_schema_extra or {})
    return OptionSpec(
        name=name,
        group=group,
        kind=kind,
        text=field.description or "",
        unit=extra["unit"],
        unset=extra["unset"],
        required=field.is_required(),
        default=None if field.is_required() else field.get_default(call_default_factory=True),
        nullable=nullable,
        choices=choices,
        bounds=_bounds(field),
    )


def _without_none(annotation: object) -> tuple[object, bool]:
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation, False
    members = [member for member in get_args(annotation) if member is not type(None)]
    if len(members) != 1:
        raise TypeError(f"an option has one type, or one type and None: {annotation}")
    return members[0], True


def _kind(name: str, annotation: object) -> tuple[Kind, tuple[str, ...]]:
    if annotation in _SCALARS:
        return _SCALARS[annotation], ()
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "choice", tuple(arguments)
    if origin is list:
        return ("ints" if arguments[0] is int else "strs"), ()
    if origin is dict:
        return "json", ()
    raise TypeError(f"option {name}: no command-line form for {annotation}")


def _bounds(field: FieldInfo) -> tuple[str, ...]:
    found: list[str] = []
    for check in cast("list[object]", field.metadata):
        known = _BOUNDS.get(type(check).__name__)
        if known is not None:
            limit = getattr(check, known[0])
            found.append(f"{known[1]} {limit if isinstance(limit, int) else format(limit, 'g')}")
    return tuple(found)
