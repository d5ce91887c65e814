"""Which arguments an installed SGLang has, read in its source: importing it would take half a minute and a GPU.

Promises: nothing of SGLang is run. Its arguments are the annotated fields of the classes in `srt/server_args.py`
and, since 0.5.2x, `srt/arg_groups/fields`, and what begins with two dashes in those files.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path


def package_of(python: str | None) -> Path | None:
    """The folder of the package sglang that an interpreter would import, as far as its place tells; None: of this
    process."""
    if python is None:
        found = importlib.util.find_spec("sglang")
        return None if found is None or found.origin is None else Path(found.origin).parent
    home = Path(python).expanduser().parent.parent
    return next(iter(sorted(home.glob("lib/python3*/site-packages/sglang"))), None)


@cache
def arguments_of(package: Path) -> frozenset[str]:
    """Names of its arguments with dashes, without the two in front; empty where its source has another form."""
    files = [package / "srt" / "server_args.py", *(package / "srt" / "arg_groups" / "fields").glob("*.py")]
    names: set[str] = set()
    for file in files:
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names |= {
                    field.target.id.replace("_", "-")
                    for field in node.body
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                }
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names |= {node.value[2:]} if node.value.startswith("--") else set()
    return frozenset(names)
