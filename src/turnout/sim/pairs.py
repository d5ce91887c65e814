"""Virtual prefill and decode engines as pairs: rooms in which the two halves of a request meet.

A room is used once. Promises: KV moves only while both halves live, and is decoded only by an engine with the very
label and root that made it; whatever else happens, each half ends as an abort, at the latest PAIR_S after it came.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from turnout.core.types import Finish

PAIR_S = 20.0
TRANSFER_S = (0.01, 0.5)
TELL_S = 0.01  # until the other half knows


class Half(Protocol):
    """A virtual engine."""

    label: str
    root: str

    def ended(self, run: Any, finish: Finish, message: str) -> None:
        """Ends a request that is in a room; nothing for one that has ended."""
        ...

    def arrived(self, run: Any, made: Any) -> None:
        """The decode half has first token and KV of the prefill half."""
        ...


@dataclass
class Room:
    """`made`: the prefill half's request once its first token exists, with the label and the root that made it."""

    prefill: tuple[Half, Any] | None = None
    decode: tuple[Half, Any] | None = None
    made: tuple[str, str] | None = None


@dataclass
class Rooms:
    """Of one world; `later` sets its timers, `uniform` draws how long a transfer takes."""

    later: Callable[..., Any]
    uniform: Callable[[float, float], float]
    open: dict[int, Room] = field(default_factory=dict[int, Room])
    used: set[int] = field(default_factory=set[int])

    def came(self, number: int, half: Half, run: Any, made: bool) -> None:
        """The decode half, or the prefill half with its first token `made`."""
        if number in self.used:
            self.later(TELL_S, half.ended, run, Finish.ABORT, "the room is over")
            return
        room = self.open.setdefault(number, Room())
        if made:
            room.prefill, room.made = (half, run), (half.label, half.root)
        else:
            room.decode = half, run
        if room.prefill is not None and room.decode is not None:
            self.later(self.uniform(*TRANSFER_S), self._move, number)
        else:
            self.later(PAIR_S, self.over, number, "the other half never came")

    def over(self, number: int, why: str) -> None:
        """One half has gone, or waited for too long: the other ends too."""
        self.used.add(number)
        room = self.open.pop(number, None)
        for side in () if room is None else (room.prefill, room.decode):
            if side is not None:
                half, run = side
                self.later(TELL_S, half.ended, run, Finish.ABORT, why)

    def _move(self, number: int) -> None:
        room = self.open.pop(number, None)
        if room is None or room.prefill is None or room.decode is None:
            return
        self.used.add(number)
        (first, made), (second, run) = room.prefill, room.decode
        if room.made != (second.label, second.root):
            for half, one in (room.prefill, room.decode):
                half.ended(one, Finish.ABORT, "KV of other weights")
            return
        second.arrived(run, made)
        first.ended(made, Finish.LENGTH, "")
