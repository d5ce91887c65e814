"""The ledger: what became of every group, written before it is said. One writer, one thread.

    with ledger.transaction():      nested ones join; all of it is there after the outermost, or none
        ledger.move(...)            only GroupBook moves groups
        ledger.after_commit(say)    effects wait until what they tell is written

Owns ledger.sqlite. Promises: when a transaction has returned, what it wrote outlives this process, whenever it is
killed (docs/guides/ledger.md); when it raises, nothing of it is there, no effect of it has happened, and `counts`
are what they were; a later incarnation's ledger is never written (OwnerLost). `counts` are kept by state in O(1),
read from the file when it is opened. Reading is turnout.rollout.ledger_read, which needs no owner.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import ClassVar, Self

from turnout.core.errors import InvariantBroken, LedgerError, TurnoutError
from turnout.core.ports import Clock
from turnout.core.types import RolloutGroup
from turnout.core.version import WeightVersion
from turnout.rollout.group_machine import ENDED, GroupEvent, GroupState
from turnout.rollout.ledger_backfill import Backfill
from turnout.rollout.ledger_moves import PendingMoves
from turnout.rollout.ledger_owner import Claim, Ownership
from turnout.rollout.ledger_read import LedgerReader
from turnout.rollout.ledger_rows import TOKEN_COLUMNS, GroupRow, Piece, piece_row
from turnout.rollout.ledger_schema import Database

ADMIT = "admit"
_PIECE = "INSERT INTO trajectories VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_SUM_UP = """INSERT OR REPLACE INTO forgotten SELECT group_id, json_group_array(json_object('member', member,
    'versions', json(versions), 'engines', json(engines), 'finish', finish, 'reward', reward)) FROM
    (SELECT * FROM trajectories WHERE group_id = ?1 AND EXISTS (SELECT 1 FROM groups WHERE group_id = ?1 AND state
    IN ('trained', 'dropped', 'requeued')) ORDER BY member, start) GROUP BY group_id"""
_FORGET = """DELETE FROM trajectories WHERE group_id = ?1
    AND EXISTS (SELECT 1 FROM groups WHERE group_id = ?1 AND state IN ('trained', 'dropped', 'requeued'))"""
FORGET_GROUPS = 2
FORGOTTEN = "forgotten_before_step"


class _Scope:
    """The `with` of a transaction; one object serves all of them."""

    def __init__(self, begin: Callable[[], None], end: Callable[[BaseException | None], None]) -> None:
        self._begin, self._end = begin, end

    def __enter__(self) -> None:
        self._begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)


class Ledger(LedgerReader):
    """The writer. `incarnation` is the one that it got; `counts` the number of groups by state."""

    threaded: ClassVar[bool] = True  # a simulator's ledger moves its log itself

    def __init__(self, database: Database, claim: Claim) -> None:
        """Takes the ledger (turnout.rollout.ledger_owner says when that is refused)."""
        super().__init__(database)
        self._moves = PendingMoves()
        self._clock: Clock = claim.clock
        self._scope, self._depth, self._failed = _Scope(self._begin, self._end), 0, False
        self._after: list[Callable[[], None]] = []
        if self._connection.in_transaction:  # whoever had an in-memory database before was stopped in one
            self._connection.rollback()
        self._owner = Ownership(self._connection, claim)
        self.counts = self.count_states()
        self._added = self.counts.total()
        self._forgotten = int(self.meta(FORGOTTEN) or 0)
        self._before = self.counts, self._added, self._forgotten
        # of groups that have not ended, where this incarnation wrote them
        self._rows: dict[str, GroupRow] = {}
        self._covered, self._stale = self._cover(), list[str]()
        threaded = self.threaded and self.path is not None and not database.exclusive
        self._backfill = Backfill(self.path) if threaded and self.path is not None else None

    @property
    def incarnation(self) -> int:
        return self._owner.incarnation

    def transaction(self) -> AbstractContextManager[None]:
        """All that is written within is there at the end, or nothing of it. Raises LedgerError, OwnerLost."""
        return self._scope

    def _begin(self) -> None:
        if not self._depth:
            self._before = self.counts.copy(), self._added, self._forgotten
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                self._owner.check()
            except (sqlite3.Error, TurnoutError) as error:
                raise self._undone(error) from None
        self._depth += 1

    def _end(self, error: BaseException | None) -> None:
        self._depth -= 1
        if self._depth:
            # also where the caller goes on: half of a nested one must not stay
            self._failed |= error is not None
            return
        if error is None:
            try:
                self._commit()
            except (sqlite3.Error, TurnoutError) as fault:
                raise self._undone(fault) from None
            effects, self._after = self._after, []
            for effect in effects:
                effect()
        elif (told := self._undone(error)) is not error:
            raise told from None

    def _commit(self) -> None:
        if self._failed:
            raise InvariantBroken("a part of a ledger transaction failed, and the rest went on")
        if self.counts.total() != self._added or min(self.counts.values(), default=0) < 0:
            raise InvariantBroken(f"{self._added} groups were admitted, there are {dict(self.counts)}")
        self._write_moves()
        self._connection.execute("COMMIT")

    def _undone(self, error: BaseException) -> BaseException:
        """Takes the transaction back; the error as callers know it."""
        self.counts, self._added, self._forgotten = self._before
        self._after.clear()
        self._rows.clear()
        self._moves.clear()
        self._failed = False
        if self._connection.in_transaction:
            self._connection.rollback()
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.IntegrityError):
            return LedgerError(f"ledger {self.path or 'in memory'} can't be written: {error}")
        return error

    def row(self, group_id: str) -> GroupRow:
        """See LedgerReader; `move` refuses a row that is not the one of the file."""
        return self._rows[group_id] if group_id in self._rows else super().row(group_id)

    def after_commit(self, effect: Callable[[], None]) -> None:
        """Within a transaction: `effect` runs once it is written, in order."""
        self._within()
        self._after.append(effect)

    def add(self, group: RolloutGroup, step: int) -> None:
        """A new attempt, WAITING, admitted at this step; the transaction raises InvariantBroken where it is there
        already."""
        self._within()
        name, state = group.group_id, GroupState.WAITING
        row = GroupRow(name, group.ordinal, group.attempt, group.prompt.prompt_id, state, step, None, None, 1)
        if name in self._rows:
            raise InvariantBroken(f"group {name} was taken twice")
        self._tell(None, row, ADMIT, step)
        self._rows[name] = row
        self.counts[state] += 1
        self._added += 1

    def move(
        self, row: GroupRow, event: GroupEvent, after: GroupState, step: int | None, cause: str | None
    ) -> None:
        """Moves a group from the state of its row, as read in this transaction, to `after`."""
        self._within()
        name = row.group_id
        if row is not (now := self._rows.get(name)) and row != (now or self.row(name)):
            raise InvariantBroken(f"group {name} is not {row.state} any more")
        trained = step if after is GroupState.TRAINED else None
        moved = GroupRow(
            name, row.ordinal, row.attempt, row.prompt_id, after, row.admitted, trained, cause, row.moves + 1
        )
        self._tell(row, moved, event.value, step)
        if after in ENDED:
            self._rows.pop(name, None)
        else:
            self._rows[name] = moved
        self.counts[row.state] -= 1
        self.counts[after] += 1

    def _read(self, select: str, *values: object) -> sqlite3.Cursor:
        self._write_moves()
        return super()._read(select, *values)

    def _write_moves(self) -> None:
        if self._moves:
            self._moves.write(self._connection)

    def journal(self, pieces: Iterable[Piece]) -> None:
        """Adds tokens of members in flight; raises InvariantBroken for a group that is not, or a piece that is
        there already. Many pieces in one call cost little more than one."""
        rows = [piece_row(piece) for piece in pieces]
        with self.transaction():
            strays = sum(not self._in_flight(row[0]) for row in rows)
            if strays:
                raise InvariantBroken(f"{strays} pieces belong to groups not in flight")
            try:
                self._connection.executemany(_PIECE, rows)
            except sqlite3.IntegrityError:
                raise InvariantBroken("tokens were journalled twice") from None

    def _in_flight(self, group_id: str) -> bool:
        row = self._rows.get(group_id) or self.find(group_id)
        return row is not None and row.state is GroupState.INFLIGHT

    def store(self, group: RolloutGroup) -> list[tuple[bytearray, bytearray]]:
        """The whole members of a group, in place of their pieces; token ids and log-probs as they are stored."""
        self._within()
        self._connection.execute("DELETE FROM trajectories WHERE group_id = ?", (group.group_id,))
        rows = [piece_row(Piece(group.group_id, at, 0, t)) for at, t in enumerate(group.trajectories)]
        self._connection.executemany(_PIECE, rows)
        self._forget_some()
        return [row[TOKEN_COLUMNS] for row in rows]

    def forget(self, group_ids: Iterable[str]) -> None:
        """Tokens, log-probs, masks and texts of groups that have ended go (of others they stay); what made them,
        their rewards and histories stay."""
        names = [(name,) for name in group_ids]
        with self.transaction():
            self._write_moves()
            self._connection.executemany(_SUM_UP, names)
            self._connection.executemany(_FORGET, names)

    def put_batch(self, step: int, group_ids: Sequence[str]) -> None:
        """What a step is made of, in order; of one incarnation the last one counts."""
        with self.transaction():
            row = (step, self.incarnation, json.dumps(list(group_ids)))
            self._connection.execute("INSERT OR REPLACE INTO batches VALUES (?, ?, ?)", row)

    def _forget_some(self) -> None:
        """A few groups at a time, so that no call takes long."""
        if not self._stale and self._forgotten < self._covered:
            self._stale = [name for batch in self.batches(self._forgotten) for name in batch.group_ids]
            self._forgotten += 1
            self.put_meta(FORGOTTEN, str(self._forgotten))
        if self._stale:
            self.forget(self._stale[:FORGET_GROUPS])
            del self._stale[:FORGET_GROUPS]

    def put_version(self, version: WeightVersion, step: int, state: str) -> None:
        """A version exported after so many train steps is now published, committed, aborted or abandoned."""
        row = (
            version.label,
            version.incarnation,
            version.counter,
            version.root,
            step,
            state,
            self._clock.wall(),
        )
        with self.transaction():
            self._connection.execute("INSERT OR REPLACE INTO versions VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def abandon_versions(self, step: int) -> list[str]:
        """On resume at a checkpoint: versions exported later, or never committed, are abandoned; their labels.
        What an aborted one was made from did not lead to the checkpoint either where it is later: it is void."""
        with self.transaction():
            self._connection.execute(
                "UPDATE versions SET state = 'void' WHERE state = 'aborted' AND incarnation < ? AND step > ?",
                (self.incarnation, step),
            )
            found = self._connection.execute(
                "UPDATE versions SET state = 'abandoned' WHERE state IN ('published', 'committed', 'remade') "
                "AND incarnation < ? AND (step > ? OR state = 'published') RETURNING label",
                (self.incarnation, step),
            ).fetchall()
        return sorted(row[0] for row in found)

    def remade_versions(self, step: int, root: str) -> None:
        """A resume made these weights again, and could not publish them: what abandoned versions of them sampled
        stands, for later resumes too."""
        with self.transaction():
            self._connection.execute(
                "UPDATE versions SET state = 'remade' WHERE state = 'abandoned' AND step = ? AND root = ?",
                (step, root),
            )

    def put_checkpoint(self, step: int, version: str) -> None:
        """A checkpoint is complete. Tokens of groups trained before the older of the two newest are forgotten, a
        few whenever a group is stored."""
        with self.transaction():
            row = (step, self.incarnation, version, self._clock.wall())
            self._connection.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)", row)
            self._connection.execute("DELETE FROM checkpoints WHERE step > ?", (step,))
            self._covered = self._cover()

    def _cover(self) -> int:
        steps = self.checkpoint_steps()
        return steps[-2] if len(steps) > 1 else 0

    def put_meta(self, key: str, value: str) -> None:
        """A fact of the run: `run_id`, `data_fingerprint` and the like."""
        with self.transaction():
            self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def renew(self) -> None:
        """Keeps the lease while nothing else is written; call it at least every LEASE_S / 4."""
        if self._owner.due and not self._depth:
            with self.transaction():
                pass

    def close(self) -> None:
        """Lets the next owner in at once, and closes the file."""
        try:
            with self.transaction():
                self._owner.release()
        finally:
            if self._backfill is not None:
                self._backfill.close()
            super().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _tell(self, before: GroupRow | None, now: GroupRow, event: str, step: int | None) -> None:
        at = self._clock.wall()
        line = (now.group_id, now.moves - 1, event, now.state.value, step, self.incarnation, at, now.cause)
        self._moves.add(before, now, line)

    def _within(self) -> None:
        if not self._depth:
            raise InvariantBroken("the ledger is written in a transaction only")
