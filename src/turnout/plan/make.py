"""A plan from what was asked: reads the run's file, the machines and the runs to calibrate with, then searches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turnout.config.load import load
from turnout.config.run_config import RunConfig
from turnout.core.errors import Fault, ModelError
from turnout.plan.calibrate import Recorded, lengths_of, measured, read_run
from turnout.plan.cluster import Cluster, Found, read_cluster, this_machine
from turnout.plan.configured import own_prediction
from turnout.plan.flags import Flags, checked
from turnout.plan.layouts import Layout, Work
from turnout.plan.lengths import expected
from turnout.plan.rates import Measured, rates
from turnout.plan.report import Plan
from turnout.plan.search import Candidate, best_of, candidates, confirmed, smallest
from turnout.plan.shapes import ModelShape, shape_of
from turnout.plan.timing import Prediction
from turnout.plan.virtual import simulate
from turnout.train.model_zoo import at_hand, resolve_checkpoint


@dataclass(frozen=True)
class Asked:
    """`run` and the options `own` on top of it; `cluster` None: this machine. `scale` of measured lengths;
    `prompt`: tokens of a prompt where no run told."""

    run: Path
    own: tuple[str, ...] = ()
    cluster: Path | None = None
    calibrate: tuple[Path, ...] = ()
    scale: float = 1.0
    prompt: float = 256.0


def plan_of(asked: Asked) -> Plan:
    """Raises ConfigError, DataError and ModelError for what can't be planned with."""
    config = load(asked.run, asked.own)
    found = this_machine() if asked.cluster is None else read_cluster(asked.cluster)
    runs = recorded(asked.calibrate, found)
    work, lengths_from = work_of(config, runs, asked)
    known = known_of(work, found, runs)

    def virtual(row: Candidate) -> Prediction:
        assert row.parts is not None
        return simulate(row.parts, config, row.changes)

    rows = confirmed(candidates(work, found, known), virtual)
    best = best_of(rows)
    if best is None:
        lacking = smallest(work, found)
        return Plan(asked.run.name, found, work, lengths_from, rows, None, lacking=lacking)
    flags = checked(best, found.cluster, asked.run, asked.own)
    usable = _usable(rows, found.cluster, asked) if flags.refused else None
    own = own_prediction(config, work, found, known)
    return Plan(asked.run.name, found, work, lengths_from, rows, best, flags, usable, own)


def _usable(rows: Sequence[Candidate], cluster: Cluster, asked: Asked) -> tuple[Candidate, Flags] | None:
    """The first whose flags the checks take."""
    for row in rows:
        if row.prediction is not None:
            flags = checked(row, cluster, asked.run, asked.own)
            if not flags.refused:
                return row, flags
    return None


def recorded(folders: Sequence[Path], found: Found) -> list[Recorded]:
    cores = found.cluster.devices if found.cluster.cores else None
    return [read_run(folder, cores) for folder in folders]


def known_of(work: Work, found: Found, runs: Sequence[Recorded]) -> Measured | None:
    """What the runs measured; None without any."""
    if not runs:
        return None
    alone = rates(work, Layout("resident", 1, 1, 1), found)
    return measured(runs, (alone.base_s.value, alone.request_s.value, alone.prefill_token_s.value))


def work_of(config: RunConfig, runs: Sequence[Recorded], asked: Asked) -> tuple[Work, str]:
    """What a step is made of, and where its lengths are from."""
    limit, prompt = config.rollout_max_response_len, asked.prompt
    lengths = expected(limit)
    source = "assumed: lognormal, a quarter of --rollout-max-response-len its median"
    if runs:
        lengths = lengths_of(runs, limit, asked.scale)
        source = f"measured: {', '.join(run.folder.name for run in runs)}"
        groups = sum(run.config.rollout_batch_size * len(run.steps) for run in runs)
        prompt = sum(step.prompt_tokens for run in runs for step in run.steps) / groups
    return Work(
        shape=model_shape(config.hf_checkpoint),
        lengths=lengths,
        prompt=prompt,
        groups=config.rollout_batch_size,
        samples=config.n_samples_per_prompt,
        micro=config.max_tokens_per_gpu,
        head=config.head_chunk_tokens,
        checkpointing=config.gradient_checkpointing,
        running=config.engine_max_running_requests,
        reference=config.uses_reference and config.ref_model is None,
    ), source


def model_shape(name: str) -> ModelShape:
    """Of the model's config.json, which must be here; its weights need not."""
    folder = resolve_checkpoint(name) if name.startswith("tiny:") else at_hand(name)
    path = None if folder is None else folder / "config.json"
    if path is None or not path.is_file():
        reason, remedy = (
            "its config.json is not on this machine",
            "name a folder with it; weights are not needed",
        )
        raise ModelError(Fault("--hf-checkpoint", name, reason, remedy))
    try:
        return shape_of(json.loads(path.read_text(encoding="utf-8")), str(path))
    except ValueError as error:
        raise ModelError(Fault("--hf-checkpoint", str(path), f"is no JSON: {error}")) from None
