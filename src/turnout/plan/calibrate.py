"""Durations and lengths from runs that were made: their metrics.jsonl, config.json and ledger.

The times of a decode step, of a request in it and of a prompt are fitted to the rollouts of all steps, with what
the machine lets expect as the prior for what the runs do not tell apart (two runs of different lengths or batches
do). Promises: the first step of a run, which warms up, is left out; a run with too few steps, or whose halves
computed at once on cores that they share, is refused rather than believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnout.config.load import load
from turnout.config.run_config import RunConfig
from turnout.core.errors import ConfigError, Fault
from turnout.observe.metrics import SECONDS, Row, read_metrics
from turnout.plan.batching import EnginePace, engine_seconds
from turnout.plan.lengths import changed
from turnout.plan.rates import Measured
from turnout.rollout.ledger_read import LedgerReader

LEAST_STEPS = 4
TRUST = 0.001  # in the prior, against each step's own time
LEAST_SHARE = 0.02  # of the prior that a fitted time keeps
Floats = NDArray[np.floating[Any]]
FLAG = "--calibrate"


@dataclass(frozen=True)
class Step:
    """One train step: response tokens of each of its samples, prompt tokens of its groups, seconds by phase."""

    lengths: tuple[int, ...]
    prompt_tokens: float
    seconds: dict[str, float]


@dataclass(frozen=True)
class Recorded:
    """What one run left. `engine_devices` and `train_devices` are threads where devices are cores."""

    folder: Path
    config: RunConfig
    steps: tuple[Step, ...]
    engine_devices: int
    train_devices: int
    density: float | None

    @property
    def transport(self) -> str:
        delta = self.config.update_weight_mode == "delta" and self.config.update_weight_transport == "disk"
        return "disk delta" if delta else self.config.update_weight_transport


def read_run(folder: Path, cores: int | None) -> Recorded:
    """`cores` of this machine where devices are cores. Raises ConfigError and DataError."""
    for name in ("config.json", "metrics.jsonl", "ledger.sqlite"):
        if not (folder / name).is_file():
            raise ConfigError(Fault(FLAG, str(folder), f"has no {name}", "name the directory of a run"))
    config = load(folder / "config.json")
    rows = [(step, row) for step, row in read_metrics(folder / "metrics.jsonl") if SECONDS + "train" in row]
    if len(rows) < LEAST_STEPS:
        reason = f"has {len(rows)} train steps, and the first one warms up"
        raise ConfigError(Fault(FLAG, str(folder), reason, f"give a run of at least {LEAST_STEPS}"))
    threads = (config.rollout_num_gpus_per_engine, config.actor_gpus)
    if cores is not None:
        threads = config.engine_thread_count(cores), config.trainer_thread_count(cores) * config.actor_gpus
    if config.schedule != "sync":
        reason = (
            f"its schedule is {config.schedule}: how long a rollout takes is not told where training goes on"
        )
        raise ConfigError(Fault(FLAG, str(folder), reason, "give a run of --schedule sync"))
    ledger = LedgerReader.of((folder / "ledger.sqlite").resolve())
    try:
        steps = tuple(_step(ledger, step, row) for step, row in rows[1:])
    finally:
        ledger.close()
    density = [row["weights/density"] for _, row in rows if row.get("weights/density") is not None]
    shown = float(median([d for d in density if d is not None])) if density else None
    return Recorded(folder, config, steps, *threads, density=shown)


def _step(ledger: LedgerReader, step: int, row: Row) -> Step:
    """`step`: train steps done with it, as metrics count."""
    batch = ledger.batch(step - 1)
    lengths: list[int] = []
    for group in () if batch is None else batch.group_ids:
        members: dict[int, int] = {}
        for piece in ledger.pieces(group):
            made = sum(tokens for tokens, _ in piece["versions"])
            members[piece["member"]] = members.get(piece["member"], 0) + made
        lengths += members.values()
    names = ("rollout", "train", "publish", "prepare", "activate", "step")
    seconds = {name: row.get(SECONDS + name) or 0.0 for name in names}
    return Step(tuple(lengths), row.get("tokens/prompt") or 0.0, seconds)


def lengths_of(runs: Sequence[Recorded], limit: int, factor: float) -> tuple[int, ...]:
    """Of all samples, as they would be under `limit` and `factor` times as long; raises ConfigError where the
    ledgers tell none."""
    found: list[int] = []
    for run in runs:
        own = [length for step in run.steps for length in step.lengths]
        found += changed(own, run.config.rollout_max_response_len, limit, factor)
    if not found:
        names = ", ".join(str(run.folder) for run in runs)
        raise ConfigError(Fault(FLAG, names, "the ledger holds no lengths"))
    return tuple(found)


def measured(runs: Sequence[Recorded], prior: tuple[float, float, float]) -> Measured:
    """What the runs say of one device of an engine and of the trainer. `prior`: what is expected of a decode
    step, of a request in it, and of a prompt token, on one device; only their proportions count."""
    base, request, prefill = _engine(runs, prior)
    train_base, train_token = _trainer(runs)
    last = runs[-1]

    def typical(phase: str) -> float:
        return median(step.seconds[phase] for step in last.steps)

    names = "rollout", "train", "publish", "prepare", "activate"
    rest = median(
        max(0.0, step.seconds["step"] - sum(step.seconds[name] for name in names)) for step in last.steps
    )
    return Measured(
        ", ".join(run.folder.name for run in runs),
        1,
        1,
        base,
        request,
        prefill,
        train_base,
        train_token,
        last.transport,
        typical("publish"),
        typical("prepare"),
        typical("activate"),
        rest,
        last.density,
    )


def _engine(runs: Sequence[Recorded], prior: tuple[float, float, float]) -> tuple[float, float, float]:
    rows, seconds = [], []
    for run in runs:
        engines, lanes = max(1, run.config.updated_engines), run.config.engine_max_running_requests
        for step in run.steps:
            if not step.lengths:
                continue
            dealt = [step.lengths[at::engines] for at in range(engines)]
            units = (EnginePace(1, 0, 0, lanes), EnginePace(0, 1, 0, lanes))
            found = [max(engine_seconds(own, unit)[0] for own in dealt) for unit in units]
            rows.append([value / run.engine_devices for value in (*found, step.prompt_tokens / engines)])
            seconds.append(step.seconds["rollout"])
    base, request, prefill = fitted(np.array(rows), np.array(seconds), np.array(prior))
    return float(base), float(request), float(prefill)


def _trainer(runs: Sequence[Recorded]) -> tuple[float, float]:
    rows, seconds = [], []
    for run in runs:
        for step in run.steps:
            tokens = sum(step.lengths) + step.prompt_tokens
            rows.append([1 / run.train_devices, tokens / run.train_devices])
            seconds.append(step.seconds["train"])
    typical = fmean(row[1] / row[0] for row in rows)
    base, token = fitted(np.array(rows), np.array(seconds), np.array([0.1 * typical, 0.9]))
    return float(base), float(token)


def fitted(rows_SF: Floats, seconds_S: Floats, prior_F: Floats) -> Floats:
    """The factors that explain the seconds best, by relative error, none below a share of its prior; where the rows
    do not tell factors apart they keep the prior's proportions. Steps beyond twice the median error are left out
    once (something else ran)."""
    kept = np.ones(len(seconds_S), dtype=bool)
    found_F = prior_F
    for _ in range(2):
        found_F = _ridge(rows_SF[kept], seconds_S[kept], prior_F)
        errors_S = np.abs(rows_SF @ found_F / np.maximum(seconds_S, 1e-9) - 1)
        kept = errors_S <= max(0.1, 2 * float(np.median(errors_S)))
    return found_F


def _ridge(rows_SF: Floats, seconds_S: Floats, prior_F: Floats) -> Floats:
    scale = float(np.sum(seconds_S) / np.sum(rows_SF @ prior_F))
    scaled_F = prior_F * scale
    weighed_SF = rows_SF * scaled_F / seconds_S[:, None]
    free = np.ones(len(prior_F), dtype=bool)
    share_F = np.ones(len(prior_F))
    for _ in range(len(prior_F)):
        left_S = 1 - weighed_SF[:, ~free] @ share_F[~free]
        inside = weighed_SF[:, free]
        pull = TRUST * len(seconds_S) * np.eye(inside.shape[1])
        share_F[free] = np.linalg.solve(inside.T @ inside + pull, inside.T @ left_S + pull.sum(axis=1))
        low = free & (share_F < LEAST_SHARE)
        if not low.any() or low.sum() == free.sum():
            break
        share_F[low], free = LEAST_SHARE, free & ~low
    return scaled_F * np.maximum(share_F, LEAST_SHARE)
