"""The engine's counters under a clock that is set by hand, and their text."""

from __future__ import annotations

import re

from turnout.core.types import Finish
from turnout.engine.metrics import EngineMetrics, Exposition, Histogram
from turnout.engine.request_machine import Request
from turnout.protocol.sglang import SamplingParams


def test_times_rates_and_counts():
    now = 100.0
    metrics = EngineMetrics(lambda: now)
    first, second = (Request(rid, [1] * 10, SamplingParams(), 0) for rid in ("a", "b"))
    second.cached = 8
    metrics.submitted(first)
    metrics.submitted(second)
    now = 100.3
    metrics.stepped([first])
    now = 100.8
    metrics.stepped([first, second])
    assert (metrics.prompt_tokens, metrics.cached_tokens, metrics.hit_rate()) == (20, 8, 0.4)
    now = 101.3
    metrics.stepped([first, second])
    assert abs(metrics.generated_per_second() - 5 / 1.3) < 1e-9
    first.finish = Finish.ABORT
    metrics.ended(first)
    metrics.ended(first)
    assert (metrics.requests, metrics.aborted, metrics.generated_tokens) == (1, 1, 5)
    assert sum(metrics.first_token.counts) == 2 and abs(metrics.first_token.total - 1.1) < 1e-9
    assert sum(metrics.between.counts) == 3 and abs(metrics.between.total - 1.5) < 1e-9
    assert sum(metrics.request.counts) == 1
    metrics.paused()
    now = 106.3
    assert metrics.generated_per_second() == 0.0 and metrics.pause_seconds() == 5.0
    metrics.resumed()
    now = 110.0
    assert metrics.pause_seconds() == 5.0
    assert len(metrics._live) == 1


def test_the_text_format():
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    out = Exposition({"model_name": 'a"b\\c\nd'})
    out.value("sglang:x_total", "counter", "Said.", 3, source="k")
    out.histogram("sglang:h_seconds", "Said too.", histogram)
    label = r'model_name="a\"b\\c\nd"'
    assert out.text().splitlines() == [
        "# HELP sglang:x_total Said.", "# TYPE sglang:x_total counter",
        f'sglang:x_total{{{label},source="k"}} 3',
        "# HELP sglang:h_seconds Said too.", "# TYPE sglang:h_seconds histogram",
        f'sglang:h_seconds_bucket{{{label},le="0.1"}} 2', f'sglang:h_seconds_bucket{{{label},le="1.0"}} 3',
        f'sglang:h_seconds_bucket{{{label},le="+Inf"}} 4', f"sglang:h_seconds_sum{{{label}}} 7.65",
        f"sglang:h_seconds_count{{{label}}} 4",
    ]  # fmt: skip
    sample = re.compile(r'[a-zA-Z_:][a-zA-Z0-9_:]*(\{([a-z_]+="([^"\\]|\\.)*",?)*\})? \S+')
    assert all(line.startswith("# ") or sample.fullmatch(line) for line in out.text().splitlines())
