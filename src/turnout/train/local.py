"""The trainer of one process: parameters, gradients and moments in flat buffers of its own.

Promises: those of turnout.train.step. A state that does not fit is refused before anything changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from turnout.train.checkpoint import load_state, save_state
from turnout.train.critic import Critic
from turnout.train.export import export_tensors, plan_export
from turnout.train.fused import fuse
from turnout.train.head import HeadOptions
from turnout.train.model import DTYPES, CausalModel, freeze, load_causal_model
from turnout.train.parameters import AdamW, FlatParameters
from turnout.train.settings import TrainerSettings
from turnout.train.step import Parts, TrainStep
from turnout.weights.tensors import HostTensor


class LocalBackend(TrainStep):
    """Implements TrainBackend in this process, on its CPU or its one CUDA device."""

    def __init__(self, settings: TrainerSettings, now: Callable[[], float] = time.perf_counter) -> None:
        """Loads checkpoint and reference. Sets torch's thread count and, where asked, deterministic
        algorithms, for the whole process."""
        prepare_torch(settings)
        options = HeadOptions(settings.temperature, settings.head_chunk_tokens)
        dtype = DTYPES[settings.dtype]
        model = load_causal_model(settings.checkpoint, options, settings.gradient_checkpointing)
        named = dict(model.module.named_parameters())
        self._entries = plan_export(settings.checkpoint, named, model.tied_head)
        self._flat = FlatParameters(named.items(), dtype)
        model.slots = self._flat.slots
        fuse(model.module)
        reference: CausalModel | None = None
        if settings.reference is not None:
            reference = freeze(load_causal_model(settings.reference, options, False), dtype)
        critic = None if settings.critic is None else Critic(settings, settings.critic, now)
        parts = Parts(model, AdamW(self._flat, settings.optimizer), reference, critic=critic)
        super().__init__(settings, parts, now)

    def export(self) -> Iterator[HostTensor]:
        return export_tensors(self._entries, dict(self._model.module.named_parameters()))

    def save(self, folder: Path) -> None:
        save_state(folder, self._flats, self.counters)

    def load(self, folder: Path) -> None:
        self.counters = load_state(folder, self._flats)

    @property
    def _flats(self) -> dict[str, FlatParameters]:
        """The parameters of every model that trains, by what the names of its files begin with."""
        return {"": self._flat} | ({} if self._critic is None else {"critic_": self._critic.flat})


def prepare_torch(settings: TrainerSettings) -> None:
    """Sets thread count, seed and, where asked, deterministic algorithms, for the whole process."""
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    torch.use_deterministic_algorithms(settings.deterministic)
