"""Guards of the production's code, each switched off from outside by one wrong function.

A world that does not notice is worth nothing: each of these must show within 200 seeds (`turnout simulate
--sabotage NAME`). A sabotage is (where, which attribute, what makes the wrong one of the real one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Wrong = Callable[[Any], Any]


@dataclass(frozen=True)
class Sabotage:
    """`owner` is a module or class, `attribute` what is replaced there, `wrong` makes the replacement."""

    line: str
    owner: Any
    attribute: str
    wrong: Wrong


SABOTAGES: dict[str, Sabotage] = {}


@contextmanager
def sabotaged(name: str) -> Iterator[None]:
    """One guard is off within."""
    found = SABOTAGES[name]
    real = found.owner.__dict__[found.attribute]
    setattr(found.owner, found.attribute, found.wrong(real))
    try:
        yield
    finally:
        setattr(found.owner, found.attribute, real)
