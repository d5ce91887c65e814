"""The token journal: members' tokens on their way to the ledger, many at a time.

Promises: what was reported is written at most `DELAY_S` later, or once `PENDING_MAX` members have something to
write; a member's tokens are taken when they are written, all that it has then as one piece; pieces of one member
follow one another, also after a write that failed or was taken back, whose tokens come with the member's next ones;
those of a group that has ended some other way are forgotten, not written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from turnout.core.errors import TurnoutError
from turnout.core.ports import Clock
from turnout.core.types import RolloutGroup, Trajectory
from turnout.rollout.ledger import Ledger
from turnout.rollout.ledger_rows import Piece

DELAY_S = 0.25
PENDING_MAX = 1024


class Source(Protocol):
    """A member while it is made (turnout.rollout.draft.Draft), or once it has ended (a Trajectory)."""

    @property
    def seed(self) -> int: ...

    def after(self, tokens: int) -> Trajectory:
        """All that is sure of it but its first tokens."""
        ...


class TokenJournal:
    """See the module. `close` writes the rest. `fault` is told of a write that failed and that nobody waits for."""

    def __init__(self, ledger: Ledger, clock: Clock, fault: Callable[[TurnoutError], None]) -> None:
        self._ledger, self._clock, self._fault = ledger, clock, fault
        self._pending: dict[str, Keeper] = {}  # by group
        self._count = 0
        self._later: asyncio.Task[None] | None = None

    def keeper(self, group: RolloutGroup) -> Keeper:
        """Who takes the tokens of a group, whose members exist as far as `group` has them, by their seeds."""
        made = group.trajectories
        have, done = {t.seed: len(t.response_ids) for t in made}, {t.seed for t in made if not t.partial}
        return Keeper(group.group_id, self, have, done)

    def add(self, keeper: Keeper) -> None:
        """One more of its members has something to write; it is written soon."""
        self._pending[keeper.group_id] = keeper
        self._count += 1
        if self._count >= PENDING_MAX:
            self._write_unasked()
        elif self._later is None:
            self._later = asyncio.ensure_future(self._soon())

    def write(self) -> None:
        """Writes all that there is. Raises LedgerError, InvariantBroken."""
        pending, self._pending, self._count = self._pending, {}, 0
        if not pending:
            return
        told = [(keeper, list(keeper.pieces())) for keeper in pending.values()]

        def written() -> None:
            for keeper, pieces in told:
                keeper.written(pieces)

        with self._ledger.transaction():
            self._ledger.journal([piece for _, pieces in told for piece in pieces])
            self._ledger.after_commit(written)

    def _write_unasked(self) -> None:
        try:
            self.write()
        except TurnoutError as fault:
            self._fault(fault)

    def forget(self, group_id: str) -> None:
        """The group is written as a whole, or not at all."""
        keeper = self._pending.pop(group_id, None)
        if keeper is not None:
            self._count -= len(keeper.sources)

    async def close(self) -> None:
        """Writes the rest; nothing is taken after that."""
        if self._later is not None:
            self._later.cancel()
            await asyncio.gather(self._later, return_exceptions=True)
        self.write()

    async def _soon(self) -> None:
        await self._clock.sleep(DELAY_S)
        self._later = None
        self._write_unasked()


@dataclass(slots=True)
class Keeper:
    """The members of one group (turnout.rollout.worker.Members). `have`: by seed, how many tokens were written;
    `done`: those whose end was written, which is final: a score that a group gets later is the group's to store;
    `sources`: by number, the members that have something to write."""

    group_id: str
    journal: TokenJournal
    have: dict[int, int] = field(default_factory=dict[int, int])
    done: set[int] = field(default_factory=set[int])
    sources: dict[int, Source] = field(default_factory=dict[int, Source])

    def tokens(self, member: int, draft: Source) -> None:
        fresh = member not in self.sources
        self.sources[member] = draft
        if fresh:
            self.journal.add(self)

    def ended(self, member: int, made: Trajectory) -> None:
        self.tokens(member, made)

    def pieces(self) -> Iterator[Piece]:
        """What the ledger lacks."""
        sources, self.sources = self.sources, {}
        for member, source in sources.items():
            if source.seed in self.done:
                continue
            start = self.have.get(source.seed, 0)
            part = source.after(start)
            if part.response_ids or not part.partial:
                yield Piece(self.group_id, member, start, part)

    def written(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            self.have[piece.part.seed] = piece.start + len(piece.part.response_ids)
            if not piece.part.partial:
                self.done.add(piece.part.seed)
