"""The trainer of one of several ranks: the train step of turnout.train.step on this rank's part of the parameters.

Every rank makes the same call with the same arguments at the same time; what is its own part of a batch follows
from its rank. The process group is there before; who asks the ranks has the deadline (turnout.train.ranks), for a
collective call of a part of them waits as long as torch lets it.

Promises: those of turnout.train.resting, with the same report on every rank (but for its seconds); any number of
ranks loads what any other saved, LocalBackend included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from turnout.core.errors import Fault, ModelError
from turnout.train.checkpoint import read_state, save_state
from turnout.train.critic import Critic, CriticParts
from turnout.train.export import export_tensors
from turnout.train.head import HeadOptions
from turnout.train.model import DTYPES, read_config
from turnout.train.pieces import Piece
from turnout.train.resting import RestingStep
from turnout.train.settings import TrainerSettings
from turnout.train.sharded_load import Source, empty_causal_model
from turnout.train.sharded_model import Mesh, ShardedModel, check_split
from turnout.train.sharded_parameters import ShardedAdamW, local_part
from turnout.train.sharded_value import ShardedValueModel
from turnout.train.step import Parts, prepare_torch
from turnout.weights.tensors import HostTensor


class ShardedBackend(RestingStep):
    """Implements TrainBackend on one rank. What `export` gives has no data but on rank 0; every rank takes it."""

    def __init__(self, settings: TrainerSettings, now: Callable[[], float] = time.perf_counter) -> None:
        """Loads checkpoint and reference and keeps this rank's part. Raises ConfigError where the model cannot be
        split by the sizes asked for."""
        prepare_torch(settings)
        check_split(read_config(settings.checkpoint), settings)
        if settings.critic is not None:
            check_split(read_config(settings.critic.checkpoint), settings, "critic")
        mesh = Mesh.of(settings.tensor_parallel, settings.expert_parallel)
        dtype = DTYPES[settings.dtype]
        options = HeadOptions(settings.temperature, settings.head_chunk_tokens)
        model = empty_causal_model(settings.checkpoint, options, settings.gradient_checkpointing)
        source = Source(settings.checkpoint, model, torch.float32)
        self._entries = source.entries
        policy = ShardedModel(model, source, mesh, dtype)
        self._adamw = ShardedAdamW(policy, settings.optimizer)
        self._trained = {"": self._adamw}  # every model that trains, by what names in a checkpoint begin with
        self._dtype = dtype
        reference = None
        if settings.reference is not None:
            frozen = empty_causal_model(settings.reference, options, False)
            frozen.module.requires_grad_(False)
            reference = ShardedModel(frozen, Source(settings.reference, frozen, dtype), mesh, dtype)
        critic: Critic | None = None
        if (how := settings.critic) is not None:
            value = ShardedValueModel(how.checkpoint, mesh, dtype, settings.gradient_checkpointing)
            self._trained["critic_"] = adamw = ShardedAdamW(value, how.optimizer)
            critic = Critic(settings, how, CriticParts(value, adamw, mesh), now)
        super().__init__(settings, Parts(policy, self._adamw, reference, mesh, critic), now)
        frozen = [] if reference is None else list(reference.module.parameters())
        self.may_rest(self._trained, [local_part(parameter) for parameter in frozen])

    def export(self) -> Iterator[HostTensor]:
        """As TrainBackend's on rank 0, one tensor gathered at a time; on other ranks an empty one each time, and
        asking for it takes part in the gathering."""
        kept: dict[str, Tensor | None] = {}
        for entry in self._entries:
            if entry.parameter not in kept:
                if len(kept) > 1:  # fused experts lie in two parameters, and are asked for in turn
                    del kept[next(iter(kept))]
                kept[entry.parameter] = self._adamw.gather(entry.parameter, self._dtype)
            whole = kept[entry.parameter]
            if whole is None:
                yield HostTensor(entry.name, "U8", (0,), np.empty(0, np.uint8))
            else:
                yield from export_tensors([entry], {entry.parameter: whole})
        self._settle()

    def save(self, folder: Path) -> None:
        """Writes this rank's part: every rank into the same folder."""
        save_state(folder, self._pieces(), self.counters, dist.get_rank(), dist.get_world_size())
        self._settle()

    def copied(self) -> Callable[[Path], None]:
        """As Copying's, of this rank's part; writing it takes no other rank."""
        pieces, counters = [piece.copied() for piece in self._pieces()], self.counters
        rank, size = dist.get_rank(), dist.get_world_size()
        self._settle()
        return lambda folder: save_state(folder, pieces, counters, rank, size)

    def load(self, folder: Path) -> None:
        """As TrainBackend's; where one rank finds a fault no rank changes anything, and all raise."""
        fault: ModelError | None = None
        saved = None
        try:
            saved = read_state(folder, {piece.name: piece.whole for piece in self._pieces()})
        except ModelError as found:
            fault = found
        faulty = torch.tensor(float(fault is not None), device=self._model.device)
        dist.all_reduce(faulty)
        if fault is not None:
            raise fault
        if saved is None or faulty > 0:
            raise ModelError(Fault(str(folder), "", f"{int(faulty)} of the trainer's ranks cannot read it"))
        saved.copy_into(self._pieces())
        for adamw in self._trained.values():
            adamw.discard()
        self.counters = saved.counters
        self._settle()

    def _pieces(self) -> list[Piece]:
        return [piece for prefix, adamw in self._trained.items() for piece in adamw.pieces(prefix)]
