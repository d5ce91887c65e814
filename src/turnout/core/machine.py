"""What every life cycle shares: one table of (state, event) -> state, and an error for every other pair."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

from turnout.core.errors import IllegalTransition

S = TypeVar("S", bound=Hashable)
E = TypeVar("E", bound=Hashable)


class Table(Generic[S, E]):
    """A transition table. `after` is total over its pairs and raises on any other, changing nothing."""

    def __init__(self, name: str, rows: Mapping[tuple[S, E], S]) -> None:
        self.name = name
        self.rows = dict(rows)

    def after(self, state: S, event: E) -> S:
        """The state that `event` leads to from `state`; raises IllegalTransition where the table has no row."""
        try:
            return self.rows[state, event]
        except KeyError:
            raise IllegalTransition(self.name, state, event) from None

    def allows(self, state: S, event: E) -> bool:
        return (state, event) in self.rows
