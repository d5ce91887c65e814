"""Who writes the ledger: one incarnation of the run at a time.

Promises: of two that start at once one gets the ledger; a claim is refused while the owner lives (same host: its
process; another host: until its expiry, which its writes renew); once a later incarnation has it, the older one's
next transaction raises OwnerLost and writes nothing.
"""

from __future__ import annotations

import os
import socket
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass

from turnout.core.errors import ConfigError, Fault, InvariantBroken, OwnerLost
from turnout.core.ports import Clock

LEASE_S = 60.0


def process_lives(pid: int) -> bool:
    """Whether this host has a process with this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@dataclass(frozen=True)
class Claim:
    """Who wants to write. `incarnation` None: one more than the last owner's, 0 in a new ledger."""

    clock: Clock
    host: str
    pid: int
    incarnation: int | None = None
    lives: Callable[[int], bool] = process_lives

    @classmethod
    def of_this_process(cls, clock: Clock, incarnation: int | None = None) -> Claim:
        return cls(clock, socket.gethostname(), os.getpid(), incarnation)


class Ownership:
    """The row `owner`, seen from one claimant. `incarnation` is what it got."""

    def __init__(self, connection: sqlite3.Connection, claim: Claim) -> None:
        """Takes the ledger; raises ConfigError where its owner lives, or where it has seen a later incarnation."""
        self._connection, self._claim = connection, claim
        connection.execute("BEGIN IMMEDIATE")
        try:
            self.incarnation = self._take()
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise

    def check(self) -> None:
        """Within a transaction: raises OwnerLost where a later incarnation has the ledger; renews the lease."""
        row = self._connection.execute("SELECT incarnation, host, pid FROM owner").fetchone()
        if row is None or row[0] != self.incarnation:
            who = "nobody" if row is None else f"incarnation {row[0]} (process {row[2]} on {row[1]})"
            raise OwnerLost(
                f"the ledger is owned by {who}: incarnation {self.incarnation} stops before its write"
            )
        if self.due:
            self._write()

    @property
    def due(self) -> bool:
        """Whether half of the lease is over."""
        return self._expiry - self._claim.clock.wall() < LEASE_S / 2

    def _take(self) -> int:
        claim = self._claim
        row = self._connection.execute("SELECT incarnation, host, pid, expiry FROM owner").fetchone()
        least = 0 if row is None else row[0] + 1
        if row is not None and self._holds(*row[1:]):
            reason = f"process {row[2]} on {row[1]} writes it (incarnation {row[0]})"
            remedy = "stop that run first" if row[1] == claim.host else f"stop it, or wait {LEASE_S:g} s"
            raise ConfigError(Fault("ledger", "", reason, remedy))
        self.incarnation = least if claim.incarnation is None else claim.incarnation
        if self.incarnation < least:
            raise InvariantBroken(f"incarnation {self.incarnation} after {least - 1}")
        self._write()
        return self.incarnation

    def _holds(self, host: str, pid: int, expiry: float) -> bool:
        """An id of a process may be another's by now: that, too, ends with the lease."""
        if expiry <= self._claim.clock.wall():
            return False
        return host != self._claim.host or self._claim.lives(pid)

    def _write(self) -> None:
        claim = self._claim
        self._expiry = claim.clock.wall() + LEASE_S
        row = (self.incarnation, claim.host, claim.pid, self._expiry)
        self._connection.execute("INSERT OR REPLACE INTO owner VALUES (1, ?, ?, ?, ?)", row)

    def release(self) -> None:
        """Within a transaction: nobody need wait for this owner."""
        self._connection.execute("UPDATE owner SET expiry = 0 WHERE incarnation = ?", (self.incarnation,))
