"""The trainer of a run that only samples (--debug-rollout-only): weights of a checkpoint, no model. No torch.

Promises: `export` gives what a trainer of this checkpoint would before its first step, so that engines attest the
same root; nothing else is held in memory; a train step changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from turnout.core.errors import TrainError
from turnout.core.types import TrainBatch, TrainSample
from turnout.train.backend import StepReport
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.tensors import HostTensor, converted

_KINDS = {"bfloat16": "BF16", "float32": "F32"}
BUFFER = "rotary_emb.inv_freq"  # old checkpoints carry it, no model code reads it


class UntrainedBackend:
    """Implements TrainBackend for the checkpoint `folder`, in the compute type `dtype`."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._folder, self._kind = folder, _KINDS[dtype]
        self._steps_done = 0

    @property
    def steps_done(self) -> int:
        return self._steps_done

    def train(self, batch: TrainBatch) -> StepReport:
        self._steps_done += 1
        return StepReport(step=batch.step, sequences=len(batch.samples))

    def export(self) -> Iterator[HostTensor]:
        tensors = (t for t in read_checkpoint(self._folder) if not t.name.endswith(BUFFER))
        return (converted(tensor, self._kind) for tensor in tensors)

    def logprobs(self, samples: Sequence[TrainSample]) -> list[NDArray[np.float32]]:
        raise TrainError(
            f"no log-probs of {len(samples)} samples: the run has no trainer (--debug-rollout-only)"
        )

    def save(self, folder: Path) -> None:
        """There is nothing to go on from."""

    def load(self, folder: Path) -> None:
        """As `save`."""
