"""Moves of groups between their being said and their being written: many at a time, one row per group.

Promises: rows and histories are those that writing each move at once would have left; a group that is not where the
move found it, or is there twice, raises InvariantBroken when it is written.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from turnout.core.errors import InvariantBroken
from turnout.rollout.ledger_rows import GroupRow

_GROUP = "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_MOVED = """UPDATE groups SET state = ?, trained = ?, cause = ?, moves = ?
    WHERE group_id = ? AND state = ? AND moves = ?"""
_HISTORY = "INSERT INTO history VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


class PendingMoves:
    """What a transaction said and did not write yet; false when that is nothing."""

    def __init__(self) -> None:
        # by id: as in the file (None: not there), and now
        self._groups: dict[str, tuple[GroupRow | None, GroupRow]] = {}
        self._history: list[tuple[Any, ...]] = []

    def __len__(self) -> int:
        return len(self._history)

    def add(self, before: GroupRow | None, now: GroupRow, history: tuple[Any, ...]) -> None:
        """`history`: the row that tells it."""
        name = now.group_id
        self._groups[name] = self._groups[name][0] if name in self._groups else before, now
        self._history.append(history)

    def clear(self) -> None:
        self._groups.clear()
        self._history.clear()

    def write(self, connection: sqlite3.Connection) -> None:
        """All of it, before somebody reads in the transaction, or it ends."""
        moved = self._groups.values()
        fresh = [now.values() for before, now in moved if before is None]
        later = [
            (m.state.value, m.trained, m.cause, m.moves, m.group_id, before.state.value, before.moves)
            for before, m in moved
            if before is not None
        ]
        try:
            if fresh:
                connection.executemany(_GROUP, fresh)
            done = connection.executemany(_MOVED, later)
            connection.executemany(_HISTORY, self._history)
        except sqlite3.IntegrityError:
            raise InvariantBroken("a group was taken twice, or moved twice from one state") from None
        if later and done.rowcount != len(later):
            raise InvariantBroken(f"{len(later) - done.rowcount} groups are not where they were any more")
        self.clear()
