"""The lanes of a stretch of time as the dashboard draws them: spans cut to it, the short ones joined. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from turnout.observe.timeline import EVALUATE, TRAINER, UPDATE, Span

ORDER = (TRAINER, UPDATE, EVALUATE)
FINEST = 2000  # parts of the stretch: what is nearer is one span
MAX_SPANS = 6000


def lane_rows(spans: Iterable[Span], start: float, end: float) -> dict[str, Any]:
    """`lanes`: rows of `lane`, `spans` (name, start, end, args; wall seconds) and `shares` of the stretch by name;
    the trainer first, engines by name. `left_out` counts spans that were too many, the shortest first."""
    lanes: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.end > start and span.start < end:
            lanes[span.lane].append(replace(span, start=max(span.start, start), end=min(span.end, end)))
    joined = {lane: _joined(inside, (end - start) / FINEST) for lane, inside in lanes.items()}
    every = sorted((span.seconds for inside in joined.values() for span in inside), reverse=True)
    least = every[MAX_SPANS] if len(every) > MAX_SPANS else -1.0
    rows = [
        {
            "lane": lane,
            "spans": [
                [span.name, round(span.start, 4), round(span.end, 4), span.args]
                for span in joined[lane]
                if span.seconds > least
            ],
            "shares": _shares(lanes[lane], end - start),
        }
        for lane in sorted(joined, key=_place)
    ]
    return {"lanes": rows, "left_out": len(every) - sum(len(row["spans"]) for row in rows)}


def _place(lane: str) -> tuple[int, str]:
    return (ORDER.index(lane), "") if lane in ORDER else (len(ORDER), lane)


def _joined(spans: list[Span], gap: float) -> list[Span]:
    """Neighbours of one name with less than `gap` between them, and short themselves, as one."""
    found: list[Span] = []
    last: dict[str, int] = {}
    for span in sorted(spans, key=lambda span: span.start):
        place = last.get(span.name)
        before = None if place is None else found[place]
        if place is not None and before is not None and span.start - before.end < gap and span.seconds < gap:
            many = before.args.get("spans", 1) + 1
            found[place] = replace(before, end=max(before.end, span.end), args={"spans": many})
            continue
        last[span.name] = len(found)
        found.append(span)
    return found


def _shares(spans: list[Span], seconds: float) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for span in spans:
        sums[span.name] += span.seconds
    return {name: round(total / seconds, 4) for name, total in sums.items()} if seconds > 0 else {}
