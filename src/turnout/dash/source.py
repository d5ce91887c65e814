"""Everything that the dashboard tells of one run, as JSON values, from its directory. Reads only.

Owns the reader of its logs and the connection to its ledger. All calls come from one thread. Promises: a call costs
what has changed, not what there is, but for two that read all they tell of: lanes of a stretch that still grows and
groups by state, each done anew for at most a RARELY-th of the time. A file that isn't there yet, or can't be read,
is told as a text in its place.
"""

from __future__ import annotations

import json
import math
import socket
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnout.config.rundir import LEDGER, RECORD
from turnout.core.errors import ConfigError, DataError, DeadlineExceeded, Fault
from turnout.dash.texts import Texts
from turnout.dash.trajectories import group_detail, group_rows, member_tokens, named_rows
from turnout.observe.doctor import Seen, read_end, read_waits, verdict
from turnout.observe.lanes import lane_rows
from turnout.observe.metrics import LAG, MISMATCH, PHASES, RESPONSE_LEN, REWARD, SECONDS
from turnout.observe.run_picture import BUFFERED, MASKED, SLOTS, TRAINED_TOKENS, UNDER_WAY
from turnout.observe.run_reader import RunReader
from turnout.observe.timeline import spans
from turnout.placement.processes import process_state
from turnout.rollout.ledger_list import LedgerList, Wanted
from turnout.rollout.ledger_schema import state_of

OTHER_SECONDS = ("step", "evaluate", "checkpoint")
OVERVIEW = (
    *(REWARD, RESPONSE_LEN, LAG, "rollout/lag_max", MISMATCH, "tokens/response", TRAINED_TOKENS, MASKED),
    *(UNDER_WAY, BUFFERED, SLOTS, "weights/bytes", "weights/density", "train/grad_norm", "train/entropy"),
    *("train/approx_kl", "rollout/truncated_share", *(SECONDS + name for name in (*PHASES, *OTHER_SECONDS))),
)
COUNTS_EVERY_S, RARELY = 10.0, 20
LANE_STEPS, AHEAD_S = 6, 120.0
CONFIG_SHOWN = (
    "num_rollout",
    "rollout_batch_size",
    "n_samples_per_prompt",
    "rollout_slots",
    "colocate",
    "engine",
)


@dataclass
class Counted:
    """Groups by state as they were at a revision of the picture, `why` they can't be counted, and when to count
    them again."""

    revision: int = -1
    states: dict[str, int] = field(default_factory=dict[str, int])
    why: str = ""
    due: float = 0.0


@dataclass
class KeptLanes:
    """An answer and what was asked: (epoch, start, end). It stands until `due`; for good where the log is read
    beyond it."""

    asked: tuple[int, float | None, float | None]
    answer: dict[str, Any]
    due: float


class RunSource:
    """`find` gives the folder of a checkpoint by its name, for the tokenizer."""

    def __init__(self, root: Path, find: Callable[[str], Path | None]) -> None:
        if not (root / RECORD).exists():
            raise ConfigError(Fault("RUN_DIR", str(root), "holds no run", "give the directory of one"))
        self.root, self.reader = root, RunReader(root)
        self.config: dict[str, Any] = _json(root / "config.json")
        self.texts = Texts(self.config, find)
        self._ledger: LedgerList | None = None
        self._ledger_state: tuple[int, ...] = ()
        self._counted = Counted()
        self._kept: KeptLanes | None = None

    def head(self) -> dict[str, Any]:
        """What stands above every view."""
        picture, reader = self.reader.picture, self.reader
        found = self._verdict()
        return {
            "name": self.root.absolute().name,
            "run": picture.run,
            "config": {key: self.config.get(key) for key in CONFIG_SHOWN},
            "model": self.config.get("hf_checkpoint"),
            "status": picture.status or ("running" if found["status"] != 1 else "dead"),
            "reason": picture.reason,
            "doctor": found,
            "started": picture.started,
            "last": picture.last,
            "step": None if picture.step is None else picture.step + 1,
            "version": picture.fleet.committed,
            "incarnations": len(picture.incarnations),
            "faults": picture.fleet.fault_counts.total(),
            "progress": round(reader.progress, 4),
            "bad": {"count": reader.bad_count, "first": reader.bad},
            "unknown": sum(picture.unknown.values()),
        }

    def _verdict(self) -> dict[str, Any]:
        try:
            waits = read_waits(self.root)
        except ConfigError as fault:
            return {"status": 1, "text": str(fault), "waits": {}}
        here = waits.get("host") == socket.gethostname()
        process = process_state(waits["pid"]) if here else ""
        found = verdict(waits, read_end(self.root), Seen(time.time(), here, process))
        return {"status": found.status, "text": found.text, "waits": waits}

    def series(self, revision: int) -> dict[str, Any]:
        """Means by step, evaluations, counts by event."""
        picture = self.reader.picture
        return {
            "rows": picture.bins.means(OVERVIEW, revision),
            "evals": picture.evals,
            "counts": dict(picture.counts),
        }

    def shapes(self, revision: int) -> dict[str, Any]:
        """Counts of lags, lengths and causes by step."""
        return {"rows": self.reader.picture.bins.shapes(revision)}

    def versions(self, revision: int) -> dict[str, Any]:
        fleet = self.reader.picture.fleet
        return {
            "rows": fleet.version_rows(revision),
            "serving": fleet.serving(),
            "count": fleet.version_count,
            "committed": fleet.committed,
            "engines": sum(engine.updated for engine in fleet.engines.values()),
        }

    def health(self, _revision: int) -> dict[str, Any]:
        picture = self.reader.picture
        return {
            "engines": picture.fleet.engine_rows(),
            "routers": picture.fleet.routers,
            "faults": [list(fault) for fault in reversed(picture.fleet.faults)],
            "fault_counts": dict(picture.fleet.fault_counts),
            "incarnations": picture.incarnations,
        }

    def lanes(self, start: float | None, end: float | None) -> dict[str, Any]:
        """Spans from `start` to `end` (wall seconds); None: the newest LANE_STEPS steps. `first` and `last` are the
        times of the whole log, `whole` tells whether all of the stretch was read, `epoch` and `revision` when."""
        self.reader.advance()
        epoch, revision = self.reader.epoch, self.reader.picture.revision
        asked, kept, last = (epoch, start, end), self._kept, self.reader.windows.last
        begun = time.monotonic()
        if kept is not None and kept.asked == asked:
            if kept.due == math.inf:
                kept.answer = {**kept.answer, "revision": revision, "last": last}
            if kept.answer["revision"] == revision or begun < kept.due:
                return kept.answer
        answer = {"epoch": epoch, "revision": revision, **self._read_lanes(start, end)}
        now = time.monotonic()
        ended = end is not None and last is not None and last > end + AHEAD_S
        self._kept = KeptLanes(asked, answer, math.inf if ended else now + RARELY * (now - begun))
        return answer

    def _read_lanes(self, start: float | None, end: float | None) -> dict[str, Any]:
        windows = self.reader.windows
        if windows.first is None or windows.last is None:
            return {
                "first": None,
                "last": None,
                "start": 0,
                "end": 0,
                "lanes": [],
                "left_out": 0,
                "whole": True,
            }
        if start is None or end is None:
            start, end = self.reader.picture.bins.began(LANE_STEPS) or windows.first, windows.last
        start = max(windows.first, min(start, windows.last))
        end = max(start + 1e-3, min(end, windows.last))
        # a phase is told at its end, which may lie beyond
        events, whole = self.reader.between(start, end + min(AHEAD_S, 2 * (end - start)))
        found = {"first": windows.first, "last": windows.last, "start": start, "end": end, "whole": whole}
        return found | lane_rows(spans(events), start, end)

    def states(self, _revision: int = 0) -> dict[str, Any]:
        """Groups by state, counted at `revision` and at most every COUNTS_EVERY_S, or `why` the counts are older or
        none; and the causes of those that were dropped or sent back."""
        counted, begun = self._counted, time.monotonic()
        if begun >= counted.due:
            try:
                states = self._asked(lambda ledger: ledger.states())
                counted = Counted(self.reader.picture.revision, states)
            except (DataError, DeadlineExceeded) as fault:
                counted = Counted(-1, counted.states, str(fault))
            now = time.monotonic()
            counted.due = now + max(COUNTS_EVERY_S, RARELY * (now - begun))
            self._counted = counted
        causes = self.reader.picture.causes.most_common(100)
        return {"revision": counted.revision, "states": counted.states, "why": counted.why, "causes": causes}

    def groups(self, wanted: Wanted, slowest: bool) -> dict[str, Any]:
        """A page of groups. `slowest`: those that took longest, of all so far, whatever is wanted else."""
        if slowest:
            found = sorted(self.reader.picture.slowest, reverse=True)[: wanted.limit]
            names = [name for _, name, _, _ in found]
            return {"groups": self._asked(lambda ledger: named_rows(ledger, names))}
        return {"groups": self._asked(lambda ledger: group_rows(ledger, wanted))}

    def group(self, group_id: str) -> dict[str, Any] | None:
        return self._asked(lambda ledger: group_detail(ledger, group_id, self.texts))

    def tokens(self, group_id: str, member: int, first: int) -> dict[str, Any] | None:
        return self._asked(lambda ledger: member_tokens(ledger, (group_id, member), first, self.texts))

    def _asked(self, ask: Callable[[LedgerList], Any]) -> Any:
        """Of the ledger that is there now; raises DataError, DeadlineExceeded."""
        path = self.root / LEDGER
        try:
            state = state_of(path)
        except OSError:
            raise DataError(Fault("ledger", str(path), "is not there")) from None
        try:
            if self._ledger is None or self._ledger_state != state:
                self.close()
                self._ledger, self._ledger_state = LedgerList.of(path), state
            return ask(self._ledger)
        except sqlite3.Error as fault:
            self.close()
            raise DataError(Fault("ledger", str(path), f"can't be read now: {fault}", "ask again")) from None

    def close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
