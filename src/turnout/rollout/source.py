"""Which prompt comes next, as arithmetic on the position: nothing is consumed, so nothing can be lost.

Every taken prompt has an ordinal, counted from 0 over the whole run; ordinal -> (epoch, index) -> prompt is a
pure function of the seed and the number of prompts. A position is the ordinal that comes next: after a resume
with any number of ranks or engines the same prompts follow, and an epoch's end needs no case of its own.
"""

from __future__ import annotations

from turnout.core.errors import InvariantBroken
from turnout.core.rng import SeedTree
from turnout.core.types import Prompt


def epoch_order(rows: int, epoch: int, seeds: SeedTree | None) -> list[int]:
    """The row numbers of an epoch in the order taken: shuffled anew in every epoch, file order without seeds."""
    order = list(range(rows))
    if seeds is not None:
        seeds.child("epoch", epoch).random().shuffle(order)
    return order


class PromptSource:
    """Hands out (ordinal, prompt) in order. `num_epochs` None repeats the data without end."""

    def __init__(self, prompts: list[Prompt], seeds: SeedTree, shuffle: bool, num_epochs: int | None) -> None:
        if not prompts or (num_epochs is not None and num_epochs < 1):
            raise InvariantBroken(f"a source of {len(prompts)} prompts for {num_epochs} epochs")
        self._prompts = prompts
        self._seeds = seeds.child("prompts") if shuffle else None
        self._num_epochs = num_epochs
        self._orders: dict[int, list[int]] = {}
        self._position = 0

    @property
    def total(self) -> int | None:
        """Prompts of all epochs together; None where there is no end."""
        return None if self._num_epochs is None else self._num_epochs * len(self._prompts)

    @property
    def position(self) -> int:
        """The ordinal that `take` hands out next."""
        return self._position

    @property
    def epoch(self) -> int:
        """That of the next ordinal: an epoch's end is the beginning of the next one."""
        return self._position // len(self._prompts)

    @property
    def exhausted(self) -> bool:
        """Whether the data has ended: `take` returns nothing from now on."""
        return self.total is not None and self._position >= self.total

    def seek(self, position: int) -> None:
        """Goes on from this ordinal; the end of the data is a position too."""
        if position < 0 or (self.total is not None and position > self.total):
            raise InvariantBroken(f"position {position} is outside 0 to {self.total}")
        self._position = position

    def prompt_at(self, ordinal: int) -> tuple[int, int]:
        """(epoch, index into the list of prompts); index < number of prompts, so an epoch's end is (e + 1, 0)."""
        if ordinal < 0 or (self.total is not None and ordinal >= self.total):
            raise InvariantBroken(f"ordinal {ordinal} is outside the data ({self.total} prompts)")
        epoch, place = divmod(ordinal, len(self._prompts))
        return epoch, self._order(epoch)[place]

    def prompt(self, ordinal: int) -> Prompt:
        return self._prompts[self.prompt_at(ordinal)[1]]

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        """The next `count` prompts with their ordinals; fewer at the end of the data, none after it."""
        stop = self._position + count
        if self.total is not None:
            stop = min(stop, self.total)
        taken = [(ordinal, self.prompt(ordinal)) for ordinal in range(self._position, stop)]
        self._position = stop
        return taken

    def _order(self, epoch: int) -> list[int]:
        """Two epochs are kept: a requeued group may ask for the one before."""
        if epoch not in self._orders:
            if len(self._orders) >= 2:
                self._orders.pop(next(iter(self._orders)))
            self._orders[epoch] = epoch_order(len(self._prompts), epoch, self._seeds)
        return self._orders[epoch]
