"""A number and where it comes from. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Source = Literal["measured", "given", "assumed"]


@dataclass(frozen=True)
class Figure:
    """`source`: measured in a run, given by a file, or assumed; `how` says which run, key or rule."""

    value: float
    source: Source
    how: str = ""

    def times(self, factor: float, how: str = "") -> Figure:
        """The same knowledge of something `factor` times as large."""
        return replace(self, value=self.value * factor, how=how or self.how)

    def row(self) -> dict[str, object]:
        return {"value": self.value, "source": self.source, "how": self.how}


def measured(value: float, how: str) -> Figure:
    return Figure(value, "measured", how)


def given(value: float, how: str) -> Figure:
    return Figure(value, "given", how)


def assumed(value: float, how: str) -> Figure:
    return Figure(value, "assumed", how)
