"""What the rest of the system knows of a trainer: a small protocol, a report per step, one maker.

Importing this module imports no torch; `make_backend` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from turnout.core.errors import ConfigError
from turnout.core.types import TrainBatch, TrainSample
from turnout.train.settings import TrainerSettings
from turnout.weights.tensors import HostTensor

if TYPE_CHECKING:
    from turnout.train.rank_launch import Ranks


@dataclass(frozen=True)
class CriticReport:
    """The critic's part of a train step. `value_mean` and `explained_variance`, which is 1 - Var(R - V) / Var(R) (0
    where all returns are equal), are of the values before the step, over trained tokens; loss and norm are means
    over its optimizer steps."""

    value_loss: float = 0.0
    value_clip_fraction: float = 0.0
    value_mean: float = 0.0
    return_mean: float = 0.0
    explained_variance: float = 0.0
    value_grad_norm: float = 0.0
    value_lr: float = 0.0
    value_skipped_nonfinite: int = 0
    seconds_critic: float = 0.0


@dataclass(frozen=True)
class StepReport:
    """One train step. Means are over trained tokens; with several optimizer steps `loss` and `grad_norm` are
    means over them, `lr` is the last. `mismatch_*` compare the trainer's log-probs before the step with the
    engine's, `mismatch_k3` estimates KL(engine's || trainer's). `importance_*` are the off-policy weights as
    applied, `importance_bounded_share` the tokens whose weight was truncated or masked, `effective_sample_share` in
    (0, 1] is of the weights before that. `rows` counts tokens that went through the model's layers
    (a shared prompt once). `expert_*` are as in turnout.train.expert_load, 0 without experts;
    `expert_balance_loss` is that of turnout.train.expert_balance, a mean over sequences and layers without the
    coefficient, 0 where it is off;
    `routing_recorded_share` is of rows times layers, `routing_changed_share` the part of those where the trainer
    alone had chosen other experts. Seconds are of the injected clock. `critic` is None where there is none."""

    step: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    lr: float = 0.0
    sequences: int = 0
    tokens: int = 0
    rows: int = 0
    micro_batches: int = 0
    optimizer_steps: int = 0
    skipped_nonfinite: int = 0
    skipped_empty: int = 0
    entropy: float = 0.0
    clip_fraction: float = 0.0
    ratio_mean: float = 0.0
    approx_kl: float = 0.0
    reference_kl: float = 0.0
    effective_sample_share: float = 1.0
    mismatch_mean: float = 0.0
    mismatch_max: float = 0.0
    mismatch_k3: float = 0.0
    importance_mean: float = 1.0
    importance_max: float = 1.0
    importance_bounded_share: float = 0.0
    expert_load_max: float = 0.0
    expert_unused_share: float = 0.0
    expert_balance_loss: float = 0.0
    routing_recorded_share: float = 0.0
    routing_changed_share: float = 0.0
    seconds_forward: float = 0.0
    seconds_backward: float = 0.0
    seconds_optimizer: float = 0.0
    seconds_total: float = 0.0
    critic: CriticReport | None = None

    def metrics(self) -> dict[str, float]:
        """All values by name, as floats, for the metrics sinks."""
        values = asdict(self)
        values |= values.pop("critic") or {}
        return {name: float(value) for name, value in values.items()}


@dataclass(frozen=True)
class GivenBack:
    """What a trainer gave back: the bytes of weights, gradients and optimizer, and by how much what its processes
    hold fell, as measured (turnout.placement.footprint; on CUDA the device's free memory)."""

    asked: int
    fell: int


class TrainBackend(Protocol):
    """One policy being trained. Every call blocks; none may run beside another."""

    def train(self, batch: TrainBatch) -> StepReport:
        """Trains on a batch. Raises TrainError after too many non-finite steps in a row, ConfigError for a
        sequence above the token budget; in both cases the weights are as before the failing optimizer step. Raises
        TrainError also after too many steps in a row with few effective samples, the last one applied."""
        ...

    def export(self) -> Iterator[HostTensor]:
        """The weights under HF names, in the compute dtype, one copy at a time."""
        ...

    def logprobs(self, samples: Sequence[TrainSample]) -> list[NDArray[np.float32]]:
        """Per sample the log-prob of each response token (masked ones too) under the current weights."""
        ...

    @property
    def steps_done(self) -> int:
        """Train batches consumed, skipped ones too, over all resumes."""
        ...

    def save(self, folder: Path) -> None:
        """Writes everything for an exact continuation into an existing, empty folder."""
        ...

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote. Raises ModelError where it belongs to another model."""
        ...


@runtime_checkable
class Copying(Protocol):
    """A TrainBackend whose state is saved beside training."""

    def copied(self) -> Callable[[Path], None]:
        """A copy of all that `save` writes, as what writes it into an existing, empty folder: on any thread, while
        the trainer goes on."""
        ...


@runtime_checkable
class Offloading(Protocol):
    """A TrainBackend that gives the memory of weights, gradients and optimizer back between steps. From `offload`
    to `onload` its export, save and load work on what is kept; train and logprobs raise InvariantBroken."""

    def offload(self) -> GivenBack: ...

    def onload(self) -> None: ...


def make_backend(settings: TrainerSettings, ranks: Ranks | None = None) -> TrainBackend:
    """The trainer of this process, or of `ranks`. Raises ConfigError or ModelError with every fault found."""
    faults = settings.faults()
    if faults:
        raise ConfigError(faults)
    if ranks is not None:
        from turnout.train.ranks import RankedBackend  # noqa: PLC0415  (it reports as this module says)

        return RankedBackend(settings, ranks)
    from turnout.train.local import LocalBackend  # noqa: PLC0415  (torch is imported here, not before)

    return LocalBackend(settings)
