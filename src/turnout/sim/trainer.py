"""The virtual trainer: its weights are a digest of everything that it was trained on, in order.

Promises: equal batches on equal weights give equal weights, so a step that is trained again from its recorded batch
gives the recorded root; a group that is lost, doubled, foreign or in another place gives another. `History` is the
truth about what trained, kept outside of whatever a controller believes.
"""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from turnout.core.errors import TrainError
from turnout.core.ports import Clock
from turnout.core.types import TrainBatch
from turnout.sim.faults import Faults
from turnout.sim.model import root_after, weights
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
    """One life of the trainer. `seconds` draws how long a step takes."""

    def __init__(self, history: History, clock: Clock, faults: Faults, seconds: Callable[[], float]) -> None:
        self._history, self._clock, self._faults, self._seconds = history, clock, faults, seconds
        self._state, self.step = b"", 0
        self.root = root_after(self._state)
        history.add(Trained(self.root, "", 0, None))

    async def train(self, batch: TrainBatch) -> dict[str, float]:
        """One step; raises TrainError where the trainer dies under it."""
        seconds = self._seconds()
        if self._faults.hit("trainer_crash", 0.01, "trainer"):
            await self._clock.sleep(seconds / 2)
            raise TrainError("the trainer's process died")
        await self._clock.sleep(seconds)
        content = marshal.dumps(
            [(s.group_id, s.response_ids, s.logprobs, s.loss_mask, s.advantages) for s in batch.samples]
        )
        self._state = hashlib.blake2b(self._state + content, digest_size=16).digest()
        before, self.root = self.root, root_after(self._state)
        self.step += 1
        self._history.add(Trained(self.root, before, self.step, batch))
        return {
            "tokens": float(batch.response_tokens),
            "optimizer_steps": 1.0,
            "mismatch_mean": 0.0,
        }

    def export(self) -> list[HostTensor]:
        return weights(self._state)

    def save(self, folder: Path) -> None:
        (folder / STATE).write_bytes(self._state + self.step.to_bytes(8, "little"))

    def load(self, folder: Path) -> None:
        data = (folder / STATE).read_bytes()
        self._state, self.step = data[:-8], int.from_bytes(data[-8:], "little")
        self.root = root_after(self._state)
