"""Weight versions by content, and which version made which token.

A version is an incarnation (how often the run was resumed), a counter that never repeats, and the root
digest of the weights (turnout.weights.digest). Engines are given its label, so every reply names content.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from turnout.core.record import record

_LABEL = re.compile(r"v(\d{6,})-([0-9a-f]{16})")


@dataclass(frozen=True, order=True)
class WeightVersion:
    """One immutable state of the weights. `root` is 32 hex digits."""

    incarnation: int
    counter: int
    root: str

    @property
    def label(self) -> str:
        """What engines are told and answer with: v000123-<first 16 hex digits of the root digest>."""
        return f"v{self.counter:06d}-{self.root[:16]}"

    @property
    def directory(self) -> str:
        return f"weight_v{self.counter:06d}"


@lru_cache(4096)
def label_counter(label: str) -> int | None:
    """The counter in a label of ours, None for any other text ("default", a foreign engine's own name)."""
    match = _LABEL.fullmatch(label)
    return int(match.group(1)) if match else None


@record
class VersionConstraint:
    """Which weights a request may be answered with: exactly `label`, or that version and any with a higher
    counter. It rides in SGLang's `extra_key`, which routers keep: a label of ours is the minimum, one with a
    trailing "!" is exact; any other text is no constraint."""

    label: str
    exact: bool

    @classmethod
    def parse(cls, extra_key: str) -> VersionConstraint | None:
        label = extra_key.removesuffix("!")
        return None if label_counter(label) is None else cls(label, label != extra_key)

    def met_by(self, served: str) -> bool:
        """Whether weights with this label will do. An equal counter with another digest is another run's."""
        if served == self.label:
            return True
        least, counter = label_counter(self.label), label_counter(served)
        return not self.exact and least is not None and counter is not None and counter > least

    def __str__(self) -> str:
        return f"exactly {self.label}" if self.exact else f"{self.label} or newer"


@record
class Runs:
    """Run-length list over a response: ((tokens, label), ...), adjacent labels distinct, no empty run."""

    runs: tuple[tuple[int, str], ...] = ()

    def __post_init__(self) -> None:
        before = None
        for tokens, label in self.runs:
            if tokens <= 0 or label == before:
                raise ValueError(f"spans are not normal: {self.runs}")
            before = label

    def __len__(self) -> int:
        if len(self.runs) == 1:  # as nearly always
            return self.runs[0][0]
        total = 0
        for tokens, _ in self.runs:
            total += tokens
        return total

    def extended(self, tokens: int, label: str) -> Self:
        """These runs with `tokens` more tokens made by `label`."""
        if tokens == 0:
            return self
        if self.runs and self.runs[-1][1] == label:
            return type(self)((*self.runs[:-1], (self.runs[-1][0] + tokens, label)))
        return type(self)((*self.runs, (tokens, label)))

    def joined(self, more: Runs) -> Self:
        """These runs followed by others."""
        if not more.runs:
            return self
        (tokens, label), *rest = more.runs
        return type(self)((*self.extended(tokens, label).runs, *rest))

    def cut(self, tokens: int) -> Self:
        """The runs of the first `tokens` tokens."""
        kept: list[tuple[int, str]] = []
        for length, label in self.runs:
            take = min(length, tokens - sum(n for n, _ in kept))
            if take <= 0:
                break
            kept.append((take, label))
        return type(self)(tuple(kept))

    def after(self, tokens: int) -> Self:
        """The runs of all but the first `tokens` tokens."""
        kept: list[tuple[int, str]] = []
        at = 0
        for length, label in self.runs:
            at += length
            if at > tokens:
                kept.append((min(length, at - tokens), label))
        return type(self)(tuple(kept))

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(label for _, label in self.runs))


class VersionSpans(Runs):
    """Which version made which token of a response."""
