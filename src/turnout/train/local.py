"""The trainer of one process: parameters, gradients and moments in flat buffers of its own.

Promises: those of turnout.train.resting. A state that does not fit is refused before anything changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from turnout.train.checkpoint import read_state, save_state
from turnout.train.critic import Critic, CriticParts
from turnout.train.export import export_tensors, plan_export
from turnout.train.fused import fuse
from turnout.train.head import HeadOptions
from turnout.train.model import DTYPES, CausalModel, freeze, load_causal_model
from turnout.train.parameters import AdamW, FlatParameters
from turnout.train.pieces import Piece
from turnout.train.resting import RestingStep
from turnout.train.settings import TrainerSettings
from turnout.train.step import Parts, prepare_torch
from turnout.train.value_model import ValueModel
from turnout.weights.tensors import HostTensor


class LocalBackend(RestingStep):
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
        fuse(model.module, dtype)
        reference: CausalModel | None = None
        if settings.reference is not None:
            reference = freeze(load_causal_model(settings.reference, options, False), dtype)
        self._flats = {"": self._flat}  # of every model that trains, by what names in a checkpoint begin with
        critic: Critic | None = None
        if (how := settings.critic) is not None:
            value = ValueModel(how.checkpoint, dtype, settings.gradient_checkpointing)
            self._flats["critic_"] = value.flat
            critic = Critic(settings, how, CriticParts(value, AdamW(value.flat, how.optimizer)), now)
        parts = Parts(model, AdamW(self._flat, settings.optimizer), reference, critic=critic)
        super().__init__(settings, parts, now)
        frozen = [] if reference is None else list(reference.module.parameters())
        if settings.offload is not None:
            for parameter in frozen:  # storages of a mapped checkpoint can't be emptied
                parameter.data = parameter.data.clone().contiguous()
        self.may_rest(self._flats, frozen)

    def export(self) -> Iterator[HostTensor]:
        yield from export_tensors(self._entries, self._flat.weights, DTYPES[self.settings.dtype])
        self._settle()

    def save(self, folder: Path) -> None:
        save_state(folder, self._pieces(), self.counters)
        self._settle()

    def copied(self) -> Callable[[Path], None]:
        pieces, counters = [piece.copied() for piece in self._pieces()], self.counters
        self._settle()
        return lambda folder: save_state(folder, pieces, counters)

    def load(self, folder: Path) -> None:
        saved = read_state(folder, {piece.name: piece.whole for piece in self._pieces()})
        saved.copy_into(self._pieces())
        for flat in self._flats.values():
            flat.restored()
        self.counters = saved.counters
        self._settle()

    def _pieces(self) -> list[Piece]:
        return [piece for prefix, flat in self._flats.items() for piece in flat.pieces(prefix)]
