"""One side of `benchmarks.trainer`, in a process of its own (or a rank of it): GRPO steps at several settings.

Both sides take the same samples with fp32 masters, Turnout in bf16, the other in what is faster here, one AdamW
step a train step, old log-probs those of the same forward pass. `padded` is transformers with FSDP2: samples
sorted by length, padded to the longest of their micro-batch, logits of response positions only, gradients reduced
with the last micro-batch. Its setting is samples a micro-batch, Turnout's is tokens a micro-batch. Rank 0 prints
one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from benchmarks.trainer_work import WORK, samples_of
from turnout.core.types import TrainBatch, TrainSample
from turnout.train.local import LocalBackend
from turnout.train.settings import OptimizerSettings, TrainerSettings
from turnout.train.sharded import ShardedBackend

DEADLINE = timedelta(seconds=1800)
CLIP_LOW, CLIP_HIGH = 0.8, 1.28


@dataclass(frozen=True)
class Job:
    """What a process is told. A step of more than `worse` times the fastest so far ends the search upwards;
    `dtype` is what the padded side computes in, as its processor does faster."""

    side: str
    model: str
    work: str
    settings: tuple[int, ...]
    rounds: int
    threads: int
    share: int = 1
    rank: int = 0
    ranks: int = 1
    meeting: str = ""
    worse: float = 1.5
    dtype: str = "bfloat16"


@dataclass
class Side:
    """`step` trains once at a setting; `state` are the bytes of weights, gradients, moments and compute copies."""

    step: Callable[[int], object]
    state: int


def turnout_side(job: Job, samples: Sequence[TrainSample]) -> Side:
    settings = TrainerSettings(
        Path(job.model), threads=job.threads, optimizer=OptimizerSettings(lr=1e-6), ranks=job.ranks
    )
    backend = LocalBackend(settings) if job.ranks == 1 else ShardedBackend(settings)
    batch = TrainBatch(0, "", tuple(samples))

    def step(budget: int) -> object:
        backend.settings = TrainerSettings(**{**vars(settings), "max_tokens_per_micro_batch": budget})
        return backend.train(batch)

    step(job.settings[0])
    parameters = sum(p.numel() for p in backend._model.module.parameters())
    return Side(step, parameters * (4 + 4 + 8 + 2) // job.ranks)


def padded_side(job: Job, samples: Sequence[TrainSample]) -> Side:
    torch.set_num_threads(job.threads)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, job.dtype), reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.98), fused=True)
    order = sorted(samples, key=lambda s: len(s.prompt_ids) + len(s.response_ids))[job.rank :: job.ranks]
    tokens = sum(len(s.response_ids) for s in samples)

    def step(size: int) -> object:
        pieces = [order[at : at + size] for at in range(0, len(order), size)]
        for piece in pieces:
            model.set_requires_gradient_sync(piece is pieces[-1])
            (padded_loss(model, piece) * (job.ranks / tokens)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step(job.settings[0])
    parameters = sum(p.numel() for p in model.parameters())
    return Side(step, parameters * (4 + 4 + 8) // job.ranks)


def padded_loss(model: Any, piece: Sequence[TrainSample]) -> torch.Tensor:
    """The sum over response tokens of the clipped objective, of one padded micro-batch."""
    rows = [(*s.prompt_ids, *s.response_ids) for s in piece]
    longest, first = max(map(len, rows)), min(len(s.prompt_ids) for s in piece)
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest)
    scale = torch.zeros(len(rows), longest)
    for at, (row, sample) in enumerate(zip(rows, piece)):
        ids[at, : len(row)], mask[at, : len(row)] = torch.tensor(row), 1
        scale[at, len(sample.prompt_ids) : len(row)] = torch.tensor(sample.advantages)
    keep = longest - first + 1
    logits = model(ids, attention_mask=mask, use_cache=False, logits_to_keep=keep).logits[:, :-1].float()
    chosen = logits.gather(2, ids[:, first:, None])[..., 0] - logits.logsumexp(-1)
    ratio, weight = torch.exp(chosen - chosen.detach()), scale[:, first:]
    return -torch.minimum(ratio * weight, ratio.clamp(CLIP_LOW, CLIP_HIGH) * weight).sum()


def resident(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def over_ranks(values: list[float], job: Job, how: dist.ReduceOp.RedOpType) -> list[float]:
    row = torch.tensor(values, dtype=torch.float64)
    if job.ranks > 1:
        dist.all_reduce(row, how)
    return row.tolist()


def measured(job: Job, side: Side, setting: int, base: int) -> dict[str, float]:
    """Seconds of a step (the slowest rank's median), and what all ranks held at most above their state."""
    seconds = []
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(job.rounds):
        began = time.perf_counter()
        side.step(setting)
        seconds.append(time.perf_counter() - began)
    above = resident("VmHWM") - base - side.state
    (slowest,) = over_ranks([median(seconds)], job, dist.ReduceOp.MAX)
    (held,) = over_ranks([float(above)], job, dist.ReduceOp.SUM)
    return {"setting": setting, "seconds": slowest, "bytes_above_state": held}


def main(words: list[str]) -> int:
    job = Job(**json.loads(words[0]))
    dist.init_process_group(
        "gloo", init_method=f"file://{job.meeting}", rank=job.rank, world_size=job.ranks, timeout=DEADLINE
    )
    samples = samples_of(WORK[job.work], job.share)
    base = resident("VmRSS")
    side = (turnout_side if job.side == "turnout" else padded_side)(job, samples)
    tokens = sum(len(s.prompt_ids) + len(s.response_ids) for s in samples)
    rows: list[dict[str, float]] = []
    for setting in job.settings:
        if job.rounds > 1 and setting != job.settings[0]:
            side.step(setting)  # what this size allocates first
        rows.append(measured(job, side, setting, base))
        rows[-1]["tokens_per_second"] = tokens / rows[-1]["seconds"]
        if rows[-1]["seconds"] > job.worse * min(row["seconds"] for row in rows):
            break
    if job.rank == 0:
        print(json.dumps({"job": asdict(job), "tokens": tokens, "state_bytes": side.state, "rows": rows}))
    dist.destroy_process_group()
    assert np.isfinite([row["seconds"] for row in rows]).all()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
