"""What can be said of a run from its directory: whether it moves, what it waits for, how it ended. Reads only.

Promises: of a run on this host whose process has gone without an end it says so, with what it waited for last; a
run that goes on and tells nothing (its process is stopped, its event loop stands still) is named as that.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnout.core.errors import ConfigError, Fault

MOVES, DEAD, STALLED = 0, 1, 3  # exit statuses
SILENT_S = 15.0  # the watch writes every 2 s
STOPPED = "T"


@dataclass(frozen=True)
class Seen:
    """What is known besides the files: the wall time, whether this is the run's host, and the state of its process
    (as in proc(5); empty: it is gone)."""

    wall: float
    here: bool
    process: str


@dataclass(frozen=True)
class Verdict:
    """`status` is the exit status of `turnout doctor`; `row` what waits.json held."""

    status: int
    text: str
    row: dict[str, Any]


def read_waits(run: Path) -> dict[str, Any]:
    """waits.json, empty where the run has not begun to wait. Raises ConfigError for what is no run's directory."""
    if not (run / "run.json").exists():
        raise ConfigError(Fault("RUN_DIR", str(run), "holds no run", "give the directory of one"))
    try:
        return json.loads((run / "waits.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as fault:
        raise ConfigError(Fault(str(run / "waits.json"), "", f"can't be read: {fault}")) from None


def read_end(run: Path) -> dict[str, Any]:
    """Of summary.json, which an incarnation writes at its end and the next removes; empty before."""
    try:
        return json.loads((run / "summary.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}


def verdict(waits: dict[str, Any], end: dict[str, Any], seen: Seen) -> Verdict:
    """What to say, and the exit status."""
    if end:
        reason = end.get("reason") or ""
        ended_well = end["status"] in ("finished", "paused")
        return Verdict(
            MOVES if ended_well else DEAD, f"{end['status']}{f': {reason}' if reason else ''}", waits
        )
    if not waits:
        return Verdict(MOVES, "the run has not begun to wait for anything", waits)
    age, line, process = seen.wall - waits["at"], waits["line"], f"process {waits['pid']}"
    if seen.here and seen.process in ("", "Z"):
        return Verdict(DEAD, f"{process} is gone, without an end; {age:.0f} s ago: {line}", waits)
    if seen.here and seen.process == STOPPED:
        return Verdict(STALLED, f"{process} is stopped (SIGSTOP); {age:.0f} s ago: {line}", waits)
    if age > SILENT_S:
        where = "" if seen.here else f" on {waits['host']}"
        what = (
            "has not looked at its waits (its event loop stands still)" if seen.here else "has told nothing"
        )
        return Verdict(STALLED, f"{process}{where} {what} for {age:.0f} s; the last was: {line}", waits)
    return Verdict(STALLED if waits["stalled"] else MOVES, line, waits)
