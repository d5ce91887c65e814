"""What goes wrong in a virtual world, how often, and how often it did.

Owns the draws and the counts. Promises: a fault is counted only where it hits an operation that is under way; a
kind that is not asked for never happens; `calm` ends all faults, so that what must come to its end can.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable

from turnout.core.errors import ConfigError, Fault

KINDS: dict[str, str] = {
    "controller_crash": "the controller is killed at an await",
    "torn_write": "the controller is killed in the middle of a write",
    "trainer_crash": "a train step fails, and the run with it",
    "stopped": "the controller is told to stop, with a grace period",
    "engine_crash": "an engine dies with what it runs, and starts again later",
    "request_lost": "a call never reaches the engine",
    "request_doubled": "an engine gets a call twice",
    "answer_lost": "an engine does what it is told, its answer never comes",
    "answer_late": "an answer comes seconds late",
    "refused": "an engine answers 500",
    "request_aborted": "an engine ends a request before its end",
    "stream_cut": "the connection of a stream is cut",
    "slow_engine": "an engine takes ten times as long for a while",
    "partition": "an engine cannot be reached for a while",
    "other_weights": "an engine loads something else than it was told",
    "full_disk": "no file can be written for a while",
    "file_answer_lost": "a file is created, and the call says that it failed",
    "reward_failed": "a reward raises, or is no number",
    "reward_hangs": "a reward comes seconds late or not at all",
}


class Faults:
    """The faults of one world; `tell` hears of each."""

    def __init__(
        self, rng: random.Random, kinds: Iterable[str], tell: Callable[[str, str], None] | None = None
    ) -> None:
        self._random, self._tell = rng.random, tell
        self.uniform = rng.uniform
        self.counts: Counter[str] = Counter()
        self.calm = False
        self.rates = {kind: rng.choice((0.0, 0.3, 1.0, 3.0)) for kind in sorted(kinds)}

    def hit(self, kind: str, share: float, who: str) -> bool:
        """Whether this operation of `who` meets the fault; `share` is how many do in a world of middling luck."""
        rate = self.rates.get(kind)
        if not rate or self.calm or self._random() >= rate * share:
            return False
        self.count(kind, who)
        return True

    def count(self, kind: str, who: str) -> None:
        """A fault that was drawn elsewhere hit."""
        self.counts[kind] += 1
        if self._tell is not None:
            self._tell(who, f"FAULT {kind}: {KINDS[kind]}")

    def on(self, kind: str) -> bool:
        return not self.calm and self.rates.get(kind, 0.0) > 0.0


def parse_kinds(text: str) -> tuple[str, ...]:
    """`all`, `none`, or names joined by commas; raises ConfigError for a name that is none."""
    if text in ("all", "none"):
        return tuple(KINDS) if text == "all" else ()
    names = tuple(name for name in text.split(",") if name)
    unknown = [
        Fault("--faults", name, "is no kind of fault", ", ".join(KINDS))
        for name in names
        if name not in KINDS
    ]
    if unknown:
        raise ConfigError(unknown)
    return names
