"""The token journal: members' tokens on their way to the ledger, many at a time.

Promises: what was reported is written at most `DELAY_S` later, or with the `PIECES_MAX`-th piece; pieces of one
member follow one another; those of a group that has ended some other way are forgotten, not written.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from turnout.core.ports import Clock
from turnout.core.types import RolloutGroup, Trajectory
from turnout.rollout.ledger import Ledger
from turnout.rollout.ledger_rows import Piece

DELAY_S = 0.25
PIECES_MAX = 1024


class TokenJournal:
    """See the module. `close` writes the rest."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self._ledger, self._clock = ledger, clock
        self._pieces: dict[str, list[Piece]] = {}  # by group
        self._count = 0
        self._later: asyncio.Task[None] | None = None

    def keeper(self, group: RolloutGroup) -> Keeper:
        """Who takes the tokens of a group, whose members exist as far as `group` has them, by their seeds."""
        return Keeper(group.group_id, self, {t.seed: len(t.response_ids) for t in group.trajectories})

    def add(self, piece: Piece) -> None:
        """Takes a piece; it is written soon."""
        self._pieces.setdefault(piece.group_id, []).append(piece)
        self._count += 1
        if self._count >= PIECES_MAX:
            self.write()
        elif self._later is None:
            self._later = asyncio.ensure_future(self._soon())

    def write(self) -> None:
        """Writes all that was taken."""
        pieces, self._pieces, self._count = self._pieces, {}, 0
        if pieces:
            self._ledger.journal(piece for group in pieces.values() for piece in group)

    def forget(self, group_id: str) -> None:
        """The group is written as a whole, or not at all."""
        self._count -= len(self._pieces.pop(group_id, ()))

    async def close(self) -> None:
        """Writes the rest; nothing is taken after that."""
        if self._later is not None:
            self._later.cancel()
            await asyncio.gather(self._later, return_exceptions=True)
        self.write()

    async def _soon(self) -> None:
        await self._clock.sleep(DELAY_S)
        self._later = None
        self.write()


@dataclass
class Keeper:
    """The members of one group (turnout.rollout.worker.Members). `have`: by seed, how many tokens were taken."""

    group_id: str
    journal: TokenJournal
    have: dict[int, int] = field(default_factory=dict[int, int])

    def tokens(self, member: int, new: Trajectory) -> None:
        start = self.have.get(new.seed, 0)
        self.have[new.seed] = start + len(new.response_ids)
        self.journal.add(Piece(self.group_id, member, start, new))

    def ended(self, member: int, made: Trajectory) -> None:
        start = self.have.get(made.seed, 0)
        self.have[made.seed] = len(made.response_ids)
        self.journal.add(Piece(self.group_id, member, start, made.after(start)))
