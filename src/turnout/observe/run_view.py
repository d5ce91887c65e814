"""What the panel shows: a frozen picture of a run, and the small texts made of it. No terminal here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-:=+*#"


@dataclass(frozen=True)
class EngineView:
    """One engine: `version` is the label that it attested last."""

    engine_id: str
    state: str
    version: str


@dataclass(frozen=True)
class VersionView:
    """How the last version went out: its bytes, the share of elements in it, its encoding (empty: in full)."""

    bytes: int
    density: float
    encoding: str

    @property
    def text(self) -> str:
        return f"{self.encoding}, {100 * self.density:.2g} % of elements" if self.encoding else "in full"


@dataclass(frozen=True)
class RunView:
    """A moment of a run. `step` counts train steps done, `steps` is their number where it is known; `rewards`
    holds the mean reward of every step; `evals` pairs of (step, score); `lag` is the mean and the greatest age of
    the last step's tokens in train steps; `phase_seconds` the last step's phases in order; `seconds_elapsed` since
    the start, `seconds_per_step` of recent steps; `buffer` the groups that are in flight, those
    that are complete and not trained, and the slots for all; `waits` is who waits for whom, and `stalled` whether
    nothing of it has moved for too long. None is "not known yet"."""

    run_name: str
    step: int = 0
    steps: int | None = None
    phase: str = "start"
    version: str = ""
    rewards: tuple[float, ...] = ()
    evals: tuple[tuple[int, float], ...] = ()
    tokens_per_second: float | None = None
    response_len: float | None = None
    mismatch: float | None = None
    phase_seconds: tuple[tuple[str, float], ...] = ()
    engines: tuple[EngineView, ...] = ()
    seconds_elapsed: float = 0.0
    seconds_per_step: float | None = None
    published: VersionView | None = None
    lag: tuple[float, int] | None = None
    waits: str = ""
    stalled: bool = False
    run_dir: str = ""
    buffer: tuple[int, int, int] | None = None

    @property
    def seconds_left(self) -> float | None:
        """Until the last step, at the recent pace."""
        if self.steps is None or self.seconds_per_step is None:
            return None
        return max(0, self.steps - self.step) * self.seconds_per_step


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """The last values as one line of at most `width` characters; longer histories are averaged into it. Values
    that are not finite are gaps."""
    if width < 1 or not values:
        return ""
    points = _shrunk(values, width)
    known = [value for value in points if math.isfinite(value)]
    if not known:
        return " " * len(points)
    low, high = min(known), max(known)
    span = high - low
    top = len(blocks) - 1
    return "".join(
        " " if not math.isfinite(v) else blocks[round((v - low) / span * top) if span > 0 else top // 2]
        for v in points
    )


def _shrunk(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [round(at * len(values) / width) for at in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def duration(seconds: float | None) -> str:
    """`1:05`, `2:03:04`, or a dash where it isn't known."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def number(value: float | None, digits: int) -> str:
    """A number with so many digits after the point, or a dash."""
    return "-" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def size(count: int) -> str:
    """Bytes as a person reads them: 812 B, 6.3 kB, 269 MB."""
    amount, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while amount >= 999.5 and len(units) > 1:
        amount /= 1000
        units.pop(0)
    return f"{amount:.{0 if amount >= 100 or units[0] == 'B' else 1}f} {units[0]}"


def plain_line(view: RunView) -> str:
    """The step as one line, for a log or a pipe."""
    of = "" if view.steps is None else f"/{view.steps}"
    parts = [f"step {view.step}{of}", f"reward {number(view.rewards[-1] if view.rewards else None, 3)}"]
    if view.evals:
        parts.append(f"eval {number(view.evals[-1][1], 3)}")
    parts += [
        f"len {number(view.response_len, 1)}",
        f"{number(view.tokens_per_second, 0)} tok/s",
        f"mismatch {number(view.mismatch, 4)}",
        "" if view.lag is None or not view.lag[1] else f"lag {number(view.lag[0], 2)}, at most {view.lag[1]}",
        " ".join(f"{name} {seconds:.1f}s" for name, seconds in view.phase_seconds),
        " ".join([view.version, *([size(view.published.bytes)] if view.published else [])]),
        f"{duration(view.seconds_elapsed)} elapsed, {duration(view.seconds_left)} left",
    ]
    return " | ".join(part for part in parts if part)
