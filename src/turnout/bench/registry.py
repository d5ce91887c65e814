"""What a check is, how it ends, and the table of all checks.

A check is an async function of the engine under test that returns one line of evidence. It ends in one of three
ways: it returns (passed), it raises CapabilityAbsent (the engine lacks what it checks), or anything else
(failed). A check is registered by its module's import; names are unique; the order is that of the imports.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from turnout.core.errors import InvariantBroken, TurnoutError

if TYPE_CHECKING:
    from turnout.bench.target import Target

Body = Callable[["Target"], Awaitable[str]]


class Result(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    ABSENT = "absent"


class CheckFailed(TurnoutError):
    """The engine did what it must not do; the text holds what was seen and what was expected."""


class CapabilityAbsent(TurnoutError):
    """The engine lacks what the check needs; the text says by which answer that was seen."""


@dataclass(frozen=True)
class Check:
    """`risky` tells why the check may end an engine that does not guard against it ("" where it can't): such
    a check is tried on engines of ours, on others only where the caller allows it."""

    name: str
    group: str
    body: Body
    risky: str = ""

    @property
    def line(self) -> str:
        """The first line of the check's docstring: what it proves."""
        return (self.body.__doc__ or "").strip().splitlines()[0]


@dataclass(frozen=True)
class Outcome:
    """How one check ended; `detail` is one line of evidence."""

    name: str
    group: str
    result: Result
    detail: str
    seconds: float = 0.0


CHECKS: list[Check] = []


def check(group: str, risky: str = "") -> Callable[[Body], Body]:
    """Registers an async function as a check under its own name."""

    def register(body: Body) -> Body:
        name = getattr(body, "__name__", "")
        if any(known.name == name for known in CHECKS) or not body.__doc__:
            raise InvariantBroken(f"check {name}: the name is taken, or it does not say what it proves")
        CHECKS.append(Check(name, group, body, risky))
        return body

    return register


def chosen(checks: Sequence[Check], patterns: Sequence[str]) -> list[Check]:
    """The checks of which `group.name` matches one of the regular expressions, anywhere; all for none."""
    found = [re.compile(pattern) for pattern in patterns]
    return [c for c in checks if not found or any(p.search(f"{c.group}.{c.name}") for p in found)]


def expect(good: bool, seen: str) -> None:
    """Raises CheckFailed with what was seen where a condition does not hold."""
    if not good:
        raise CheckFailed(seen)
