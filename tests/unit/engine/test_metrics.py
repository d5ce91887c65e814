"""The engine's counters under a clock that is set by hand, and their text."""

from __future__ import annotations

from turnout.core.types import Finish
from turnout.engine.metrics import EngineMetrics
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
