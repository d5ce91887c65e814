"""What went wrong in a run, by its events: engines and routers lost, groups dropped, updates aborted, stalls. Pure.

Promises: a line for each thing that is not over, or each kind of it; at most MAX_LINES, the latest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MAX_LINES = 12
MAX_REASON = 160
_LOST = {"EngineLost": "engine", "RouterLost": "router"}
_BACK = {"EngineReady": "engine", "RouterReady": "router"}
_ENDED = {"GroupDropped": "dropped", "GroupRequeued": "sent back to be sampled again"}


def troubles(events: Iterable[dict[str, Any]], now: float) -> list[str]:
    """Lines about the newest incarnation among `events` (rows of events.jsonl, in order); `now` is wall time."""
    told: dict[object, tuple[float, str]] = {}
    counts: dict[tuple[str, str], int] = {}
    lost: dict[str, tuple[float, str]] = {}
    for row in events:
        kind, at = row["event"], row["at"]
        if kind == "RunStarted":
            told, counts, lost = {}, {}, {}
        elif kind in _LOST:
            name = row[_LOST[kind]]
            phase = f" in phase {row['phase']}" if "phase" in row else ""
            lost[name] = (at, f"{name} was lost{phase}: {_short(row['reason'])}")
            told[name] = (at, f"{lost[name][1]}; it has not come again")
        elif kind in _BACK and row[_BACK[kind]] in lost:
            name = row[_BACK[kind]]
            since, what = lost[name]
            told[name] = (since, f"{what}; it served again after {at - since:.0f} s")
        elif kind in _ENDED:
            key = (kind, row["reason"])
            counts[key] = counts.get(key, 0) + 1
            groups = "1 group was" if counts[key] == 1 else f"{counts[key]} groups were"
            what = f"{groups} {_ENDED[kind]}, the last {row['group']}: {_short(row['reason'])}"
            told[key] = (at, what)
        elif kind == "VersionAborted":
            told[kind] = (at, f"the update to {row['version']} failed: {_short(row['reason'])}")
        elif kind == "RunStalled":
            told[kind, row["root"]] = (at, f"it stood still: {row['line']}")
    latest = sorted(told.values())[-MAX_LINES:]
    return [f"{_ago(now - at)}: {text}" for at, text in latest]


def _short(reason: str) -> str:
    """Without the end of an engine's log, which is for its own file."""
    first = reason.partition("; its log ")[0]
    return first if len(first) <= MAX_REASON else first[: MAX_REASON - 3] + "..."


def _ago(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s ago"
    return f"{whole // 60} min ago" if whole < 7200 else f"{whole // 3600} h ago"
