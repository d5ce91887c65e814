"""Which experts of a mixture each position of a sequence went through, as the engine that sampled it says.

A row is `width` int16, little-endian: for each layer of the model the experts of one position, best first (a layer
without experts has zeros). The position before a token is the one that it was sampled at, so a response has a row
per token, and what comes before it has `prompt` rows, one less than the prompt has tokens; MISSING where nobody
said. `ROUTED_NONE`: nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from turnout.core.errors import InvariantBroken
from turnout.core.record import record

T = TypeVar("T")
ROUTER = ".mlp.gate"
MISSING = b"\xff\xff"  # -1
BYTES = 2


@record
class RoutedExperts:
    """The record of a response, or of some neighbouring tokens of one; those have no `prompt`."""

    width: int = 0
    prompt: bytes = b""
    rows: bytes = b""

    def __len__(self) -> int:
        """Tokens that have a row."""
        return len(self.rows) // (BYTES * self.width) if self.width else 0

    def cut(self, tokens: int) -> RoutedExperts:
        if not self.width:
            return self
        return RoutedExperts(self.width, self.prompt, self.rows[: tokens * BYTES * self.width])

    def after(self, tokens: int) -> RoutedExperts:
        if not self.width:
            return self
        return RoutedExperts(self.width, b"", self.rows[tokens * BYTES * self.width :])

    def joined(self, more: RoutedExperts, counts: tuple[int, int]) -> RoutedExperts:
        """Followed by another; `counts` are the tokens of the two, either of which may have no record. Raises
        InvariantBroken where they are of different models."""
        width = self.width or more.width
        if not width:
            return self
        if width != (more.width or width):
            raise InvariantBroken(f"routed experts of {self.width} and of {more.width} values a token")
        first, last = (one.rows if one.width else missing(width, n) for one, n in zip((self, more), counts))
        return RoutedExperts(width, self.prompt, first + last)

    def sequence(self, prompt: int) -> bytes:
        """One row for every position but the last, of a prompt of so many tokens and the response."""
        before = self.prompt or missing(self.width, prompt - 1)
        return before + self.rows


ROUTED_NONE = RoutedExperts()


def routers(modules: Iterable[tuple[str, T]]) -> list[tuple[int, T]]:
    """The routers among the named modules of a model, each with the number of its layer."""
    return [
        (int(name.removesuffix(ROUTER).rpartition(".")[2]), module)
        for name, module in modules
        if name.endswith(ROUTER)
    ]


def missing(width: int, rows: int) -> bytes:
    return MISSING * (width * rows)
