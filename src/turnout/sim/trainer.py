"""The virtual trainer: its weights are a digest of everything that it was trained on, in order.

Promises: equal batches on equal weights give equal weights, so a step that is trained again from its recorded batch
gives the recorded root; a group that is lost, doubled, foreign or in another place gives another. `History` is the
truth about what trained, kept outside of whatever a controller believes.
"""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from turnout.core.types import TrainBatch, TrainSample
from turnout.sim.model import root_after, weights
from turnout.train.backend import StepReport
from turnout.weights.tensors import HostTensor

STATE = "state.bin"


@dataclass(frozen=True)
class Trained:
    """A state of the weights: its root digest, that of the state before, the steps done with it, and the batch that
    made it (None: the state that the run began with)."""

    root: str
    before: str
    step: int
    batch: TrainBatch | None


@dataclass
class History:
    """Every state that any trainer of the world was in, by root; `steps` are all steps of all lives, in time."""

    made: dict[str, Trained] = field(default_factory=dict[str, Trained])
    steps: list[Trained] = field(default_factory=list[Trained])

    def add(self, state: Trained) -> None:
        self.made.setdefault(state.root, state)
        self.steps.append(state)

    def lineage(self, root: str) -> list[Trained]:
        """The states that led to this one, the first without a batch, and itself."""
        found = [self.made[root]]
        while found[-1].batch is not None:
            found.append(self.made[found[-1].before])
        return found[::-1]


class VirtualTrainer:
    """One life of the trainer (turnout.train.backend.TrainBackend)."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._state, self.step = b"", 0
        self.root = root_after(self._state)
        history.add(Trained(self.root, "", 0, None))

    def train(self, batch: TrainBatch) -> StepReport:
        rows = [(s.group_id, s.response_ids, s.logprobs, s.loss_mask, s.advantages) for s in batch.samples]
        self._state = hashlib.blake2b(self._state + marshal.dumps(rows, 2), digest_size=16).digest()
        before, self.root = self.root, root_after(self._state)
        self.step += 1
        self._history.add(Trained(self.root, before, self.step, batch))
        return StepReport(self.step, tokens=batch.response_tokens, optimizer_steps=1)

    @property
    def steps_done(self) -> int:
        return self.step

    def logprobs(self, samples: Sequence[TrainSample]) -> list[NDArray[np.float32]]:
        """Those that the engines reported."""
        return [np.asarray(sample.logprobs, np.float32) for sample in samples]

    def export(self) -> Iterator[HostTensor]:
        return iter(weights(self._state))

    def save(self, folder: Path) -> None:
        (folder / STATE).write_bytes(self._state + self.step.to_bytes(8, "little"))

    def load(self, folder: Path) -> None:
        data = (folder / STATE).read_bytes()
        self._state, self.step = data[:-8], int.from_bytes(data[-8:], "little")
        self.root = root_after(self._state)
