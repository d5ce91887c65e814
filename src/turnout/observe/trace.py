"""trace.json: the timeline of a run for ui.perfetto.dev and chrome://tracing. Pure.

Chrome's trace format as Perfetto reads it (perfetto.dev/docs/getting-started/other-formats): one process, a thread
per lane, complete events in microseconds since the run began, counters, and marks for what went wrong. Promises:
events of a thread nest, as the format wants them: an engine's weights have a lane beside its work, and what would
overlap there still one more; at most `SPANS_MAX` spans, the newest, and `POINTS_MAX` points of each counter: what
is left out is said in `otherData` and at the first mark.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from typing import Any

from turnout.core.events import EngineLost, RouterLost, RunEnded, RunStalled, RunStarted, VersionAborted
from turnout.observe.timeline import (
    EVALUATE,
    IDLE,
    LEAST_S,
    TRAINER,
    UPDATE,
    Count,
    Span,
    Timed,
    counts,
    spans,
)

SPANS_MAX, POINTS_MAX = 100_000, 10_000
FIRST = (TRAINER, UPDATE, EVALUATE)  # lanes above the engines
WORK = frozenset({"rollout", IDLE})  # of an engine; the rest happens beside it
Row = dict[str, Any]


def trace(events: Sequence[Timed], title: str) -> bytes:
    """The whole file; `events` as turnout.observe.eventlog.read_events yields them."""
    begin = events[0][0] if events else 0.0
    whole = spans(events)
    kept = sorted(whole, key=lambda span: span.end)[-SPANS_MAX:]
    other: Row = {"began": datetime.fromtimestamp(begin, UTC).isoformat()}
    since = begin
    if len(kept) < len(whole):
        since = min(span.start for span in kept)
        other["left_out"] = f"{len(whole) - len(kept)} spans of the first {since - begin:.0f} s"
    rows: list[Row] = [_meta("process_name", {"name": title})]
    placed = list(_placed(kept))
    lanes = {lane: at for at, lane in enumerate(sorted({lane for _, lane in placed}, key=_order))}
    for lane, at in lanes.items():
        rows += [
            _meta("thread_name", {"name": lane}, at),
            _meta("thread_sort_index", {"sort_index": at}, at),
        ]
    rows += [_complete(span, lanes[lane], begin) for span, lane in placed]
    rows += [_counter(one, begin) for one in _thinned(counts(events), since, events)]
    if "left_out" in other:
        rows.append(_mark(since, other["left_out"] + " are left out", begin))
    rows += [_mark(at, text, begin) for at, text in _marks(events) if at >= since]
    head = {"displayTimeUnit": "ms", "otherData": other}
    return json.dumps({**head, "traceEvents": rows}, ensure_ascii=False, separators=(",", ":")).encode()


def _placed(spans: Iterable[Span]) -> Iterator[tuple[Span, str]]:
    """Each with the first of its lanes in which it nests."""
    open_: dict[str, list[float]] = {}  # by lane, the ends of those around the next one
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        base = span.lane if span.lane in FIRST or span.name in WORK else f"{span.lane} weights"
        for lane in (base if number == 1 else f"{base} {number}" for number in count(1)):
            ends = open_.setdefault(lane, [])
            start = span.start
            while ends and ends[-1] <= span.start + LEAST_S:
                start = max(span.start, ends.pop())
            if not ends or span.end <= ends[-1] + LEAST_S:
                end = min([span.end, *ends[-1:]])
                ends.append(end)
                same = (start, end) == (span.start, span.end)
                yield span if same else replace(span, start=min(start, end), end=end), lane
                break


def _order(lane: str) -> tuple[int, str]:
    return (FIRST.index(lane) if lane in FIRST else len(FIRST)), lane


def _micros(at: float, begin: float) -> int:
    return round(1e6 * (at - begin))


def _meta(name: str, args: Row, lane: int = 0) -> Row:
    return {"ph": "M", "name": name, "pid": 1, "tid": lane, "args": args}


def _complete(span: Span, lane: int, begin: float) -> Row:
    start, end = max(0, _micros(span.start, begin)), _micros(span.end, begin)
    row: Row = {"ph": "X", "name": span.name, "pid": 1, "tid": lane, "ts": start, "dur": max(0, end - start)}
    return row | ({"args": span.args} if span.args else {})


def _counter(one: Count, begin: float) -> Row:
    ts = max(0, _micros(one.at, begin))
    return {"ph": "C", "name": one.name, "pid": 1, "ts": ts, "args": {"value": one.value}}


def _mark(at: float, text: str, begin: float) -> Row:
    return {"ph": "i", "s": "p", "name": text, "pid": 1, "tid": 0, "ts": max(0, _micros(at, begin))}


def _thinned(found: Iterable[Count], since: float, events: Sequence[Timed]) -> list[Count]:
    """Of each counter the last value in each of POINTS_MAX parts of the time."""
    part = (events[-1][0] - since) / POINTS_MAX if events else 0.0
    last: dict[tuple[str, int], Count] = {}
    for one in found:
        if one.at >= since:
            last[one.name, int((one.at - since) / part) if part > 0 else 0] = one
    return list(last.values())


def _marks(events: Iterable[Timed]) -> Iterable[tuple[float, str]]:
    """What a reader of the timeline should stumble over."""
    for at, event in events:
        if isinstance(event, EngineLost):
            yield at, f"{event.engine} lost in {event.phase}: {event.reason}"
        elif isinstance(event, RouterLost):
            yield at, f"{event.router} lost: {event.reason}"
        elif isinstance(event, VersionAborted):
            yield at, f"{event.version or 'an update'} aborted: {event.reason}"
        elif isinstance(event, RunStalled):
            yield at, f"stalled for {event.seconds:.0f} s: {event.line}"
        elif isinstance(event, RunStarted) and event.resumed_at is not None:
            yield at, f"goes on from step {event.resumed_at}"
        elif isinstance(event, RunEnded):
            yield at, f"{event.status}{f': {event.reason}' if event.reason else ''}"
