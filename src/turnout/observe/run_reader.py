"""The picture of a run from its directory, brought up to date as the run goes on; only what was appended is read.

Owns the picture. Promises: `advance` reads at most about `budget` bytes; where a resume undoes steps that were read
already, or a file was replaced, all is read anew, so that the picture is that of one log; a line that can't be read
is counted and named, and the rest is shown.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from turnout.core.events import KINDS, from_json
from turnout.observe.event_windows import EventWindows, Timed
from turnout.observe.run_picture import RunPicture
from turnout.observe.tail import BLOCK, Tail

STARTED = b'{"event": "RunStarted"'
BAD_LINES = 5


class RunReader:
    """`epoch` grows whenever what a reader has got of the picture so far is worth nothing any more; it begins
    anywhere, so that what was got from another reader (another run, on the same port) is worth nothing either."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events, self.metrics = Tail(root / "events.jsonl"), Tail(root / "metrics.jsonl")
        self.picture, self.windows = RunPicture(), EventWindows()
        self.bad: list[str] = []
        self.bad_count = 0
        self._undone: list[tuple[int, int]] = []
        self._scanned = Tail(root / "events.jsonl")
        self._resets = secrets.randbelow(1 << 36)  # 1000 times it is whole in a browser's numbers

    @property
    def epoch(self) -> int:
        return 1000 * self._resets + self.picture.bins.epoch

    @property
    def progress(self) -> float:
        """The share of both files that was read."""
        size = self.events.size + self.metrics.size
        return 1.0 if not size else (self.events.offset + self.metrics.offset) / size

    def advance(self, budget: int = 4 * BLOCK) -> bool:
        """Whether something changed."""
        anew = self.events.look() | self.metrics.look()
        self._scanned.look()
        if anew:
            self._undone, self._scanned = [], Tail(self.events.path)
            self._scanned.look()
        if self._scan() or anew:
            self._reset()
        changed, before = anew, budget
        while budget > 0 and (lines := self.events.read(min(budget, BLOCK))):
            budget -= sum(len(line) for _, line in lines) + 1
            self._read(lines, self._event)
        while budget > 0 and (lines := self.metrics.read(min(budget, BLOCK))):
            budget -= sum(len(line) for _, line in lines) + 1
            self._read(lines, self._row)
        return changed or budget < before

    def _scan(self) -> bool:
        """Looks for new incarnations ahead of the fold; whether one undoes what was folded."""
        late = False
        while lines := self._scanned.read():
            for place, line in lines:
                if line.startswith(STARTED) and place:
                    behind = json.loads(line).get("resumed_at") or 0
                    self._undone.append((place, behind))
                    late |= self.events.offset > 0
        if self._undone and not self.events.offset:
            self.picture = RunPicture(tuple(self._undone))
        return late

    def _reset(self) -> None:
        self._resets += 1
        revision = self.picture.revision
        self.picture = RunPicture(tuple(self._undone))
        self.picture.revision, self.windows = revision, EventWindows()
        self.events.offset = self.metrics.offset = 0
        self.bad, self.bad_count = [], 0

    def _read(self, lines: list[tuple[int, bytes]], take: Any) -> None:
        self.picture.revision += 1
        for place, line in lines:
            try:
                take(place, json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as fault:
                self.bad_count += 1
                if len(self.bad) < BAD_LINES:
                    self.bad.append(f"at byte {place}: {type(fault).__name__}: {fault}")

    def between(self, start: float, end: float) -> tuple[list[Timed], bool]:
        """See EventWindows."""
        return self.windows.between(self.events.path, start, end)

    def _event(self, place: int, row: dict[str, Any]) -> None:
        kind = row["event"]
        if kind not in KINDS:
            self.picture.unknown[str(kind)[:60]] += 1
            return
        at, event = float(row["at"]), from_json(row)
        self.windows.note(place, at, event)
        self.picture.fold(place, at, event)

    def _row(self, _place: int, row: dict[str, Any]) -> None:
        self.picture.row(int(row.pop("step")), row)
