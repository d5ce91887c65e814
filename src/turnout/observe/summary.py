"""summary.json: what a run came to, for people and for the acceptance tests. And the interval of a score."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from turnout.core.events import (
    STALE,
    EngineReady,
    Event,
    GroupDropped,
    GroupRequeued,
    GroupResumed,
    StepTrained,
)
from turnout.core.ports import Store
from turnout.observe.audit import AuditReport, GroupCounts
from turnout.observe.audit_log import as_one, of_kind

Z95 = 1.959963984540054  # the 97.5 % quantile of the normal distribution


@dataclass(frozen=True)
class EvalScore:
    """A score with its 95 % interval and the number of samples behind it."""

    score: float
    low: float
    high: float
    items: int
    failed: int = 0


@dataclass(frozen=True)
class RunSummary:
    """What is written. `rewards` are the mean rewards of all steps; a number without a source is None."""

    status: str
    rewards: Sequence[float]
    seconds_total: float
    seconds_training: float
    weight_versions_committed: int
    groups: GroupCounts
    audit: AuditReport
    eval_before: EvalScore | None = None
    eval_after: EvalScore | None = None
    mismatch_mean_abs_logprob: float | None = None
    extra: dict[str, Any] = field(default_factory=dict[str, Any])

    def to_json(self) -> dict[str, Any]:
        before, after = self.eval_before, self.eval_after
        return {
            "status": self.status,
            "steps": len(self.rewards),
            "reward_first": _mean(self.rewards[:3]),
            "reward_last": _mean(self.rewards[-3:]),
            "eval_before": None if before is None else before.score,
            "eval_after": None if after is None else after.score,
            "eval_before_detail": None if before is None else asdict(before),
            "eval_after_detail": None if after is None else asdict(after),
            "seconds_total": round(self.seconds_total, 3),
            "seconds_training": round(self.seconds_training, 3),
            "weight_versions_committed": self.weight_versions_committed,
            "groups": asdict(self.groups),
            "mismatch_mean_abs_logprob": self.mismatch_mean_abs_logprob,
            "audit": {
                "passed": len(self.audit.passed),
                "failed": len(self.audit.failed_rules),
                "details": [f"{rule}: {detail}" for rule, detail in self.audit.failed],
            },
            **self.extra,
        }


def engine_summary(events: Sequence[Event]) -> dict[str, dict[str, object]]:
    """What each group of engines was (an engine's id begins with its group's name): its model, its part of a
    request, its engines, the devices of each, and how often one was started."""
    groups: dict[str, list[EngineReady]] = {}
    for event in events:
        if isinstance(event, EngineReady):
            groups.setdefault(event.engine.rpartition("-")[0], []).append(event)
    return {
        name: {
            "model": ready[0].model,
            "worker_type": ready[0].worker_type,
            "engines": len({event.engine for event in ready}),
            "devices_per_engine": len(ready[0].devices),
            "starts": len(ready),
        }
        for name, ready in groups.items()
    }


def write_summary(store: Store, path: Path, summary: RunSummary) -> None:
    """Writes it atomically: a reader sees no file, or all of it. Numbers that are not finite become null."""
    text = json.dumps(_finite(summary.to_json()), indent=2, ensure_ascii=False, allow_nan=False)
    store.publish_file(path, text.encode() + b"\n")


def lag_summary(events: Iterable[Event]) -> dict[str, Any]:
    """How old the trained tokens were, and what was too old: `lag` (`max`, `mean_token_weighted`, `histogram` of
    tokens by lag), `masked_tokens`, `evicted` groups, `replayed` ones among them, `partial_resumes`: samples that
    went on from their tokens after their group was cut, once for each time. A step that was trained again after a
    resume counts once, as it was trained last."""
    log = as_one(list(events))
    steps = of_kind(log, StepTrained)
    tokens: Counter[int] = Counter()
    for step in steps:
        for lag, count in step.lags:
            tokens[lag] += count
    replayed = sum(event.reason.startswith(STALE) for event in of_kind(log, GroupRequeued))
    dropped = sum(event.reason.startswith(STALE) for event in of_kind(log, GroupDropped))
    return {
        "lag": {
            "max": max(tokens, default=None),
            "mean_token_weighted": mean_lag(tokens),
            "histogram": {str(lag): tokens[lag] for lag in sorted(tokens)},
        },
        "replayed": replayed,
        "evicted": replayed + dropped,
        "masked_tokens": sum(step.masked for step in steps),
        "partial_resumes": sum(event.samples for event in of_kind(log, GroupResumed)),
    }


def mean_lag(tokens: Mapping[int, int]) -> float | None:
    """Of tokens counted by lag; None without any."""
    total = sum(tokens.values())
    return sum(lag * count for lag, count in tokens.items()) / total if total else None


def wilson_interval(successes: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a share by Wilson's score method; (0, 1) where nothing was counted. Raises ValueError
    where `successes` isn't between 0 and n."""
    if n < 0 or not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}")
    if n == 0:
        return 0.0, 1.0
    share, z2 = successes / n, Z95 * Z95
    middle = share + z2 / (2 * n)
    half = Z95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    scale = 1 + z2 / n
    low = 0.0 if successes == 0 else max(0.0, (middle - half) / scale)  # exact at the ends, where it rounds
    high = 1.0 if successes == n else min(1.0, (middle + half) / scale)
    return low, high


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
