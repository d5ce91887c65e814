"""What is wrong with one value, in words: pydantic's error details -> a Fault with reason and remedy."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from turnout.config.option import OptionSpec
from turnout.config.refusals import VALUES_NOT_YET
from turnout.core.errors import Fault

MAX_SHOWN = 60

_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "choice": "one of its names",
    "ints": "a list of whole numbers",
    "strs": "a list of texts",
    "json": "a mapping",
}
_RELATIONS = {
    "greater_than": ("must be greater than {gt:g}", "gt"),
    "greater_than_equal": ("must be at least {ge:g}", "ge"),
    "less_than": ("must be less than {lt:g}", "lt"),
    "less_than_equal": ("must be at most {le:g}", "le"),
}


def fault_of(detail: Mapping[str, Any], spec: OptionSpec, where: str) -> Fault:
    """The Fault for one of pydantic's error details about the option `spec`; `where` names flag and place."""
    kind, value = detail["type"], detail.get("input")
    inner = "".join(f"[{part}]" for part in detail["loc"][1:])
    if kind == "missing":
        return Fault(where, "", "is required", f"give {spec.flag} {spec.value_text}")
    seen = (
        json.dumps(value)
        if isinstance(value, str) and spec.kind in ("int", "float", "bool")
        else shown(value)
    )
    if value is None:
        remedy = (
            f"leave it out for the default ({spec.default_text})" if not spec.required else "give a value"
        )
        return Fault(where + inner, seen, "can't be empty", remedy)
    if kind in _RELATIONS:
        reason = _RELATIONS[kind][0].format(**detail["ctx"])
        return Fault(where + inner, seen, reason, f"allowed: {' and '.join(spec.bounds)}")
    if kind == "string_unicode":
        return Fault(where + inner, seen, "is not valid Unicode", "")
    if kind == "finite_number":
        return Fault(where + inner, seen, "must be a finite number", f"default: {spec.default_text}")
    if kind == "literal_error":
        known = VALUES_NOT_YET.get(spec.name, {}).get(str(value))
        if known is not None:
            return Fault(where + inner, seen, *known)
        near = difflib.get_close_matches(str(value), spec.choices, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        return Fault(where + inner, seen, "no such choice", f"{hint}one of: {', '.join(spec.choices)}")
    if kind == "string_pattern_mismatch":
        reason = "is empty" if not value else "has characters that are not allowed here"
        return Fault(where + inner, seen, reason, f"allowed: {detail['ctx']['pattern']}")
    if kind == "string_too_long":
        return Fault(where + inner, seen, f"is longer than {detail['ctx']['max_length']} characters", "")
    if inner:
        return Fault(where + inner, seen, f"must be {_element(spec)}, is {_type(value)}", "")
    remedy = "quote it in YAML" if spec.kind in ("str", "choice") else f"give {spec.flag} {spec.value_text}"
    return Fault(where, seen, f"must be {_EXPECTED[spec.kind]}, is {_type(value)}", remedy)


def _element(spec: OptionSpec) -> str:
    return "a whole number" if spec.kind == "ints" else "text"


def _type(value: Any) -> str:
    for kind, name in (
        (bool, "true or false"),
        (int, "a whole number"),
        (float, "a number"),
        (str, "text"),
        (list, "a list"),
        (dict, "a mapping"),
    ):
        if isinstance(value, kind):
            return name
    return type(value).__name__


def shown(value: Any) -> str:
    """A value as a fault shows it: on one line and short; text that could be misread in quotes."""
    if not isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False, default=str)
    elif not value or value != value.strip() or not value.isprintable():
        return quoted(value)
    else:
        text = value
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def quoted(text: str) -> str:
    """Text in quotes, with escapes, short."""
    return json.dumps(text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "...")
