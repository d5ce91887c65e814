"""What the ledger holds, read by its writer, by a resume and by `turnout inspect`; and the copy in a checkpoint.

Owns no state but the connection. Promises: every answer is of one moment; a copy is complete, synced with the
folder that it lies in, and holds what a resume needs: all groups, the histories, members and tokens of those that
have not ended, batches, versions, checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from turnout.core.errors import DataError, Fault, InvariantBroken, LedgerError
from turnout.core.types import Trajectory
from turnout.rollout.group_machine import GroupState
from turnout.rollout.ledger_rows import (
    Batch,
    GroupRow,
    Move,
    StoredGroup,
    VersionRow,
    group_id_of,
    members_of,
)
from turnout.rollout.ledger_schema import Database, read_database, write_empty

_OPEN_ROWS = """SELECT * FROM groups WHERE state NOT IN ('trained', 'dropped', 'requeued')
    ORDER BY ordinal, attempt"""
_OPEN_IDS = "(SELECT group_id FROM main.groups WHERE state NOT IN ('trained', 'dropped', 'requeued'))"
_COPIED = {
    "meta": "",
    "owner": "",
    "groups": "",
    "batches": "",
    "versions": "",
    "checkpoints": "",
    "history": f" WHERE group_id IN {_OPEN_IDS}",
    "trajectories": f" WHERE group_id IN {_OPEN_IDS}",
}


class LedgerReader:
    """Reads one ledger."""

    def __init__(self, database: Database) -> None:
        self._database, self._connection = database, database.connection

    @classmethod
    def of(cls, path: Path) -> Self:
        """Opens a file to read, also beside its writer; raises DataError."""
        return cls(read_database(path))

    @property
    def path(self) -> Path | None:
        return self._database.path

    @property
    def beside(self) -> bool:
        """Whether others can read the file while its writer has it."""
        return self.path is not None and not self._database.exclusive

    def meta(self, key: str) -> str | None:
        row = self._one("SELECT value FROM meta WHERE key = ?", key)
        return None if row is None else row[0]

    def count_states(self) -> Counter[GroupState]:
        """Groups by state. Reads all of them."""
        rows = self._all("SELECT state, count(*) FROM groups GROUP BY state")
        return Counter({GroupState(state): count for state, count in rows})

    def causes(self, state: GroupState) -> Counter[str]:
        """How many groups are dropped (or requeued) for which reason. Reads all groups."""
        rows = self._all("SELECT cause, count(*) FROM groups WHERE state = ? GROUP BY cause", state.value)
        return Counter(dict(rows))

    def next_ordinal(self) -> int:
        """The first ordinal that no group was made of."""
        row = self._one("SELECT max(ordinal) FROM groups")
        return 0 if row is None or row[0] is None else row[0] + 1

    def find(self, group_id: str) -> GroupRow | None:
        row = self._one("SELECT * FROM groups WHERE group_id = ?", group_id)
        return None if row is None else GroupRow.of(row)

    def row(self, group_id: str) -> GroupRow:
        """The row of a group; raises InvariantBroken where there is none."""
        found = self.find(group_id)
        if found is None:
            raise InvariantBroken(f"group {group_id} is not in the ledger")
        return found

    def history(self, group_id: str) -> list[Move]:
        select = (
            "SELECT event, state, step, incarnation, at, cause FROM history WHERE group_id = ? ORDER BY move"
        )
        return [Move(*row) for row in self._all(select, group_id)]

    def attempts(self, ordinal: int) -> list[GroupRow]:
        """All attempts at one prompt, in order. Reads all groups."""
        rows = self._all("SELECT * FROM groups WHERE ordinal = ? ORDER BY attempt", ordinal)
        return [GroupRow.of(row) for row in rows]

    def members(self, group_id: str) -> dict[int, Trajectory]:
        """Members that have tokens, by number; none once they are forgotten."""
        select = "SELECT * FROM trajectories WHERE group_id = ? ORDER BY member, start"
        return members_of(self._all(select, group_id))

    def token_count(self, group_id: str) -> int:
        """Tokens stored of all members of a group."""
        row = self._one("SELECT sum(length(tokens)) FROM trajectories WHERE group_id = ?", group_id)
        return (row[0] or 0) // 4

    def is_stored(self, group_id: str) -> bool:
        """Whether there are members of a group whose tokens, none even, are not forgotten."""
        return self._one("SELECT 1 FROM trajectories WHERE group_id = ? LIMIT 1", group_id) is not None

    def pieces(self, group_id: str) -> list[dict[str, Any]]:
        """What stays of members: `member`, `versions` and `engines` ([[tokens, name], ...]), `finish`, `reward`."""
        row = self._one("SELECT members FROM forgotten WHERE group_id = ?", group_id)
        if row is not None:
            return json.loads(row[0])
        select = (
            "SELECT member, versions, engines, finish, reward FROM trajectories WHERE group_id = ? "
            "ORDER BY member, start"
        )
        keys = ("member", "versions", "engines", "finish", "reward")
        rows = [dict(zip(keys, row, strict=True)) for row in self._all(select, group_id)]
        return [
            {**row, "versions": json.loads(row["versions"]), "engines": json.loads(row["engines"])}
            for row in rows
        ]

    def every_piece(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(group, piece as in `pieces`) of all groups. Reads all of the ledger, but for tokens."""
        for group_id, members in self._read("SELECT group_id, members FROM forgotten"):
            for piece in json.loads(members):
                yield group_id, piece
        select = """SELECT group_id, member, versions, engines, finish, reward FROM trajectories
            WHERE group_id NOT IN (SELECT group_id FROM forgotten) ORDER BY group_id, member, start"""
        for group_id, member, versions, engines, finish, reward in self._read(select):
            made = {"versions": json.loads(versions), "engines": json.loads(engines)}
            yield group_id, {"member": member, **made, "finish": finish, "reward": reward}

    def rows(self) -> Iterator[GroupRow]:
        """All groups by their ids."""
        return map(GroupRow.of, self._read("SELECT * FROM groups ORDER BY group_id"))

    def open_groups(self) -> list[StoredGroup]:
        """Groups that have not ended, by ordinal, with their members as far as they were written. Reads all rows of
        groups."""
        return [StoredGroup(row, self.members(row.group_id)) for row in self.open_rows()]

    def open_rows(self) -> list[GroupRow]:
        """As open_groups, without the members."""
        return [GroupRow.of(row) for row in self._all(_OPEN_ROWS)]

    def trained_since(self, step: int) -> list[GroupRow]:
        """Groups that were trained at this step or later. Reads all groups."""
        rows = self._all("SELECT * FROM groups WHERE trained >= ? ORDER BY trained, ordinal", step)
        return [GroupRow.of(row) for row in rows]

    def trained_from(self, ordinal: int) -> list[GroupRow]:
        """Trained groups of this prompt and later ones."""
        select = "SELECT * FROM groups WHERE group_id >= ? AND state = 'trained'"
        return [GroupRow.of(row) for row in self._all(select, group_id_of(ordinal, 0))]

    def last_owner(self) -> int | None:
        """The incarnation that took it last."""
        row = self._one("SELECT incarnation FROM owner")
        return None if row is None else row[0]

    def last_batch(self) -> int | None:
        """The last step with a recorded batch."""
        return self._one("SELECT max(step) FROM batches")[0]

    def batch(self, step: int) -> Batch | None:
        """What a step was made of, as its last incarnation recorded it."""
        select = "SELECT * FROM batches WHERE step = ? ORDER BY incarnation DESC LIMIT 1"
        row = self._one(select, step)
        return None if row is None else Batch(row[0], row[1], tuple(json.loads(row[2])))

    def batches(self, step: int) -> list[Batch]:
        """A step's batches of all incarnations."""
        rows = self._all("SELECT * FROM batches WHERE step = ? ORDER BY incarnation", step)
        return [Batch(step, incarnation, tuple(json.loads(names))) for step, incarnation, names in rows]

    def versions(self) -> list[VersionRow]:
        """All versions by counter."""
        select = "SELECT label, incarnation, counter, root, step, state FROM versions ORDER BY counter"
        return [VersionRow(*row) for row in self._all(select)]

    def checkpoint_steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return [row[0] for row in self._all("SELECT DISTINCT step FROM checkpoints ORDER BY step")]

    def backup(self, path: Path) -> None:
        """Writes a consistent copy of what a checkpoint needs to `path`, where nothing may be; and syncs the ledger
        itself, so that it is never behind its checkpoints. May run on another thread than the writer's if `beside`.
        The caller syncs the copy with its folder. Raises LedgerError where the copy can't be written."""
        if path.exists():
            raise DataError(Fault("ledger", str(path), "holds something already"))
        write_empty(path)
        try:
            if self.path is None or not self.beside:
                _copy(self._connection, path)
                return
            with contextlib.closing(sqlite3.connect(self.path, isolation_level=None)) as source:
                _copy(source, path)
                source.execute("PRAGMA wal_checkpoint(PASSIVE)")  # syncs the log, then the file
        except sqlite3.Error as error:
            raise LedgerError(f"the ledger can't be copied to {path}: {error}") from None

    def close(self) -> None:
        self._database.close()

    def _read(self, select: str, *values: object) -> sqlite3.Cursor:
        return self._connection.execute(select, values)

    def _one(self, select: str, *values: object) -> Any:
        return self._read(select, *values).fetchone()

    def _all(self, select: str, *values: object) -> list[Any]:
        return self._read(select, *values).fetchall()


def _copy(source: sqlite3.Connection, target: Path) -> None:
    """Copies rows into an empty ledger, within one transaction. The copy has no log and syncs nothing."""
    source.execute("ATTACH ? AS copy", (str(target),))
    try:
        source.execute("PRAGMA copy.journal_mode = OFF")
        source.execute("PRAGMA copy.synchronous = OFF")
        source.execute("BEGIN")
        for table, which in _COPIED.items():
            rows = f"SELECT * FROM main.{table}{which}"  # noqa: S608  constants above
            source.execute(f"INSERT OR REPLACE INTO copy.{table} {rows}")
        source.execute("UPDATE copy.owner SET expiry = 0")  # nobody writes the copy
        source.execute("COMMIT")
    finally:
        if source.in_transaction:
            source.execute("ROLLBACK")
        source.execute("DETACH copy")
