"""What the engine counts. Owned by the compute thread.

Promises: counting costs a step one clock reading and a few operations per token; nothing is rendered before it is
asked for; names, meanings and buckets are those of SGLang 0.5.23 where it has them (`sglang:`), else `turnout:`.
Memory does not grow with the number of requests served.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from turnout.core.types import Finish
from turnout.engine.request_machine import Request
from turnout.observe.exposition import Histogram

FIRST_TOKEN_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
REQUEST_S = (*FIRST_TOKEN_S, 600, 1200, 1800, 2400)
BETWEEN_TOKENS_S = (
    0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040, 0.060, 0.080, 0.100, 0.200,
    0.400, 0.600, 0.800, 1.0, 2.0, 4.0, 6.0, 8.0,
)  # fmt: skip
WINDOW_S = 1.0  # rates are those of the last whole window
STALE_S = 3.0  # without a step for so long the rate is 0


@dataclass
class _Times:
    """Of one live request, in seconds of the clock; `last` is that of its newest token."""

    arrived: float
    last: float | None = None


class EngineMetrics:
    """See the module. `clock` is in seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._live: dict[str, _Times] = {}
        self._window = (clock(), 0)  # began, tokens since
        self._prefilled = (0, 0)  # prompt tokens and cached ones since the hit rate was set
        self._rate, self._hit_rate, self._stepped = 0.0, 0.0, clock()
        self._paused_at: float | None = None
        self.requests, self.aborted = 0, 0
        self.prompt_tokens, self.cached_tokens, self.generated_tokens = 0, 0, 0
        self.updates, self.update_s, self.pause_s = 0, 0.0, 0.0
        self.first_token, self.between = Histogram(FIRST_TOKEN_S), Histogram(BETWEEN_TOKENS_S)
        self.request = Histogram(REQUEST_S)

    def submitted(self, request: Request) -> None:
        self._live[request.rid] = _Times(self._clock())

    def stepped(self, sampled: Iterable[Request]) -> None:
        """A step gave one token to each of these."""
        now, tokens = self._clock(), 0
        gaps: Counter[float] = Counter()  # requests of the same steps have the same gap
        for request in sampled:
            tokens += 1
            times = self._live.get(request.rid)
            if times is None:
                continue
            if times.last is None:
                self._first_token(request, now - times.arrived)
            else:
                gaps[now - times.last] += 1
            times.last = now
        for gap, count in gaps.items():
            self.between.observe(gap, count)
        self.generated_tokens += tokens
        began, before = self._window
        self._window, self._stepped = (began, before + tokens), now
        if now - began >= WINDOW_S:
            self._rate, self._window = (before + tokens) / (now - began), (now, 0)

    def ended(self, request: Request) -> None:
        times = self._live.pop(request.rid, None)
        if times is None:
            return
        self.requests += 1
        self.aborted += request.finish is Finish.ABORT
        self.request.observe(self._clock() - times.arrived)

    def paused(self) -> None:
        if self._paused_at is None:
            self._paused_at = self._clock()

    def resumed(self) -> None:
        if self._paused_at is not None:
            self.pause_s, self._paused_at = self.pause_s + self._clock() - self._paused_at, None

    def updated(self, seconds: float) -> None:
        """New weights were put into place, which took the compute thread so long."""
        self.updates, self.update_s = self.updates + 1, self.update_s + seconds

    def generated_per_second(self) -> float:
        """Tokens per second over the last window; 0 while nothing is computed."""
        return self._rate if self._clock() - self._stepped < STALE_S else 0.0

    def hit_rate(self) -> float:
        """Share of the prompt tokens of the last prefills whose KV was cached."""
        prompt, cached = self._prefilled
        return cached / prompt if prompt else self._hit_rate

    def pause_seconds(self) -> float:
        """In all, a pause that goes on included."""
        return self.pause_s + (0.0 if self._paused_at is None else self._clock() - self._paused_at)

    def _first_token(self, request: Request, waited_s: float) -> None:
        self.first_token.observe(waited_s)
        self.prompt_tokens += request.prompt_tokens
        self.cached_tokens += request.cached
        prompt, cached = self._prefilled
        if prompt >= 4096:  # a rate of the newest prompts, not of all since the start
            self._hit_rate, prompt, cached = cached / prompt, 0, 0
        self._prefilled = (prompt + request.prompt_tokens, cached + request.cached)
