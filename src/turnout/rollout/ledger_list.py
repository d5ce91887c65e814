"""Groups of a ledger page by page, and single members in pieces: what a browser asks for, never all of it.

Reads only. Promises: a page is at most LIMIT groups, by key or by one ordered scan that is broken off after
SCAN_S seconds (DeadlineExceeded); a member is read alone.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from turnout.core.errors import DeadlineExceeded
from turnout.core.types import Trajectory
from turnout.rollout.group_machine import GroupState
from turnout.rollout.ledger_read import LedgerReader
from turnout.rollout.ledger_rows import GroupRow, members_of

LIMIT = 200
SCAN_S = 2.0
STEPS = 20_000  # of SQLite's machine between two looks at the clock


@dataclass(frozen=True)
class Wanted:
    """Which groups; None is any. `step` is that of a batch, `below` the id after which to go on: newest first."""

    state: GroupState | None = None
    cause: str | None = None
    step: int | None = None
    below: str | None = None
    limit: int = 50


class LedgerList(LedgerReader):
    """See the module."""

    def page(self, wanted: Wanted) -> list[GroupRow]:
        """The newest first; those of a step in the order of its batch, a page of them after `below`."""
        limit = max(1, min(wanted.limit, LIMIT))
        if wanted.step is not None:
            return self._of_step(wanted, limit)
        terms: list[tuple[str, object]] = []
        if wanted.below is not None:
            terms.append(("group_id < ?", wanted.below))
        if wanted.state is not None:
            terms.append(("state = ?", wanted.state.value))
        if wanted.cause is not None:
            terms.append(("cause = ?", wanted.cause))
        where = f" WHERE {' AND '.join(term for term, _ in terms)}" if terms else ""
        select = f"SELECT * FROM groups{where} ORDER BY group_id DESC LIMIT ?"  # noqa: S608  constants above
        with self._scan("groups that fit the filter"):
            return [GroupRow.of(row) for row in self._all(select, *(value for _, value in terms), limit)]

    def _of_step(self, wanted: Wanted, limit: int) -> list[GroupRow]:
        batch = self.batch(wanted.step or 0)
        names = [] if batch is None else list(batch.group_ids)
        if wanted.below in names:
            names = names[names.index(wanted.below) + 1 :]
        rows = [row for name in names if (row := self.find(name)) is not None]
        fits = [
            row
            for row in rows
            if wanted.state in (None, row.state) and (wanted.cause is None or wanted.cause == row.cause)
        ]
        return fits[:limit]

    def states(self) -> dict[str, int]:
        """Groups by state. Reads all of them, or is broken off."""
        with self._scan("all groups to be counted"):
            return {state.value: count for state, count in self.count_states().items()}

    def sisters(self, group_id: str) -> list[GroupRow]:
        """All attempts at the prompt of a group, in order."""
        prompt = group_id.partition(".")[0]
        rows = self._all(
            "SELECT * FROM groups WHERE group_id > ? AND group_id < ? ORDER BY group_id",
            f"{prompt}.",
            f"{prompt}/",  # the character after the point
        )
        return sorted(map(GroupRow.of, rows), key=lambda row: row.attempt)

    def member(self, group_id: str, member: int) -> Trajectory | None:
        """One member, None where it has no tokens or they are forgotten."""
        select = "SELECT * FROM trajectories WHERE group_id = ? AND member = ? ORDER BY start"
        return members_of(self._all(select, group_id, member)).get(member)

    def version_steps(self, labels: set[str]) -> dict[str, int]:
        """Train steps in the versions with these labels."""
        found: dict[str, int] = {}
        for label in labels:
            row: Any = self._one("SELECT step FROM versions WHERE label = ?", label)
            if row is not None:
                found[label] = row[0]
        return found

    @contextmanager
    def _scan(self, what: str) -> Iterator[None]:
        end = time.monotonic() + SCAN_S
        self._connection.set_progress_handler(lambda: int(time.monotonic() > end), STEPS)
        try:
            yield
        except sqlite3.OperationalError as fault:
            if "interrupted" not in str(fault):
                raise
            raise DeadlineExceeded(what, SCAN_S) from None
        finally:
            self._connection.set_progress_handler(None, 0)
