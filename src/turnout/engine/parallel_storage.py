"""Sharded weights: one rank's part under the names and shapes of whole tensors, and rank 0's view of all parts.

Promises: a tensor comes in whole and each rank gets its part only; a digest is made of what lies in every rank's
live memory, without gathering; what is whole on every rank is compared, and a difference is a WeightError.
A buffer that nobody holds any more is dropped on every rank with the next message.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from turnout.core.errors import WeightError
from turnout.engine.live_dtypes import as_stored
from turnout.engine.parallel_channel import Channel
from turnout.engine.parallel_model import Shard
from turnout.engine.patches import Patch, Placed, exchange, in_lines, placed
from turnout.engine.storage import ModuleStorage, as_bits
from turnout.weights.changes import Bits
from turnout.weights.digest import Sums, add
from turnout.weights.map_digest import block_sums
from turnout.weights.map_rules import Piece, Place, local_name, piece

LIVE = 0  # the key of what is served
ZERO: Sums = (0, 0)


class ShardStorage:
    """One rank's part, by whole tensors' names. Bits are those of the part, flat."""

    def __init__(self, shard: Shard) -> None:
        self.specs, self.tied, self.place = shard.specs, shard.tied, shard.place
        self.local = ModuleStorage(shard.module)
        self.live, self.fresh, self.swap = self.local.live, self.local.fresh, self.local.swap

    @property
    def nbytes(self) -> int:
        """Bytes of the weights of this rank."""
        return sum(self.live(buffer).nbytes for buffer in {spec.buffer for spec in self.specs.values()})

    def part(self, name: str) -> Piece | None:
        return piece(name, self.specs[name].shape, self.place)

    def view(self, buffer: Tensor, name: str) -> Bits:
        """This rank's part of the tensor, sharing memory; of a tensor that is elsewhere, no element."""
        if self.part(name) is None:
            return as_bits(buffer.new_empty(0))
        return self.local.read(buffer, local_name(name, self.place))

    def exchange(
        self, changes: Sequence[Placed | None], buffers: Mapping[str, Tensor], write: bool
    ) -> list[Sums]:
        """This rank's part of patches, in order; nothing moves where it has none."""
        found = []
        for change in changes:
            if change is None:
                found.append(ZERO)
                continue
            name = change.patch.name
            buffer = self.specs[name].buffer
            memory = self.view(buffers[buffer] if buffer in buffers else self.live(buffer), name)
            found.append(exchange(memory, change, write))
        return found

    def sums(self, buffer: Tensor, name: str, dtype: str) -> Sums | None:
        """The digest's sums over this rank's elements as `dtype`, by their positions in the whole tensor; None
        where some element does not fit."""
        part, spec = self.part(name), self.specs[name]
        if part is None:
            return ZERO
        stored = as_stored(self.view(buffer, name), spec.dtype, dtype)
        if stored is None:
            return None
        return block_sums(stored, spec.shape, part.block(spec.shape))


@dataclass(frozen=True, eq=False)
class ShardedBuffer:
    """One buffer in every rank: rank 0's tensor, and the key under which the others keep theirs."""

    local: Tensor
    key: int


@dataclass(frozen=True, eq=False)
class ShardedPatches:
    """Patches in every rank: rank 0's part, and the key under which the others keep theirs."""

    names: list[str]
    local: list[Placed | None]
    key: int


class ParallelStorage:
    """The Storage of a sharded engine, at rank 0. Used by any thread; `swap` belongs to the one that computes."""

    takes_changes = True

    def __init__(self, shard: ShardStorage, steps: Channel, weights: Channel) -> None:
        self.specs, self.tied = shard.specs, shard.tied
        self._shard, self._steps, self._weights = shard, steps, weights
        self._places = [replace(shard.place, rank=rank) for rank in range(shard.place.tp)]
        self._keys = itertools.count(LIVE + 1)

    def live(self, buffer: str) -> ShardedBuffer:
        return ShardedBuffer(self._shard.live(buffer), LIVE)

    def fresh(self, buffer: str) -> ShardedBuffer:
        made = ShardedBuffer(self._shard.fresh(buffer), next(self._keys))
        self._weights.tell(("fresh", made.key, buffer))
        weakref.finalize(made, self._weights.forgotten.append, made.key)
        return made

    def fresh_set(self) -> dict[str, ShardedBuffer]:
        return {buffer: self.fresh(buffer) for buffer in {spec.buffer for spec in self.specs.values()}}

    def write(self, buffer: ShardedBuffer, name: str, bits: Bits) -> None:
        shape = self.specs[name].shape
        whole = bits.reshape(shape)
        for place in self._places:
            part = piece(name, shape, place)
            if part is None:
                continue
            mine = _cut(whole, part)
            if place.rank == 0:
                np.copyto(self._shard.view(buffer.local, name), mine.reshape(-1))
            else:
                self._weights.tell_one(place.rank, ("write", buffer.key, name), mine)

    def read(self, buffer: ShardedBuffer, name: str) -> Bits:
        """Gathered from the ranks; a copy."""
        shape = self.specs[name].shape
        mine = self._shard.view(buffer.local, name)
        pieces = [piece(name, shape, place) for place in self._places]
        whole = np.empty(shape, mine.dtype)
        for rank, part in enumerate(pieces):
            if part is None or (rank > 0 and part.axis is None):
                continue
            bits = mine if rank == 0 else self._weights.fetch(rank, ("read", buffer.key, name), mine.dtype)
            _cut(whole, part)[...] = bits.reshape(part.shape(shape))
        return whole.reshape(-1)

    def sums(self, buffer: ShardedBuffer, name: str, dtype: str) -> Sums | None:
        """Over every rank's part; raises WeightError where ranks differ in what each has whole."""
        others = self._weights.ask(("sums", buffer.key, name, dtype))
        found = [self._shard.sums(buffer.local, name, dtype), *others]
        part = self._shard.part(name)
        if any(sums is None for sums in found):
            if part is not None and part.axis is None and any(sums is not None for sums in found):
                raise WeightError(f"{name} differs between the ranks of this engine")
            return None
        return self._total(name, [sums for sums in found if sums is not None])

    def prepare(self, patches: Sequence[Patch]) -> ShardedPatches:
        """Each rank gets the elements that it holds."""
        by_rank = [[self._part(patch, place) for patch in patches] for place in self._places]
        made = ShardedPatches([patch.name for patch in patches], by_rank[0], next(self._keys))
        for rank in range(1, len(self._places)):
            self._weights.tell_one(rank, ("patches", made.key, by_rank[rank]))
        weakref.finalize(made, self._weights.forgotten.append, made.key)
        return made

    def exchange(
        self, prepared: ShardedPatches, buffers: dict[str, ShardedBuffer], write: bool
    ) -> list[Sums]:
        """Live buffers are written by all ranks between the same two steps."""
        channel = self._steps if write and not buffers else self._weights
        keys = {name: buffer.key for name, buffer in buffers.items()}
        mine: list[Sums] = []

        def own_share() -> None:
            held = {name: buffer.local for name, buffer in buffers.items()}
            mine.extend(self._shard.exchange(prepared.local, held, write))

        others = channel.ask(("exchange", prepared.key, keys, write), own_share)
        return [self._total(name, found) for name, *found in zip(prepared.names, mine, *others)]

    def _total(self, name: str, found: Sequence[Sums]) -> Sums:
        """Of what each rank found for one tensor."""
        part = self._shard.part(name)
        if part is not None and part.axis is None:
            if any(sums != found[0] for sums in found):
                raise WeightError(f"{name} differs between the ranks of this engine")
            return found[0]
        total = ZERO
        for sums in found:
            total = add(total, sums)
        return total

    def _part(self, patch: Patch, place: Place) -> Placed | None:
        shape = self.specs[patch.name].shape
        part = piece(patch.name, shape, place)
        if part is None:
            return None
        if part.axis is None:
            return placed(patch, patch.positions, math.prod(shape))
        here, index = in_lines(patch, shape, part.axis, part.first, part.count)
        return placed(here, index, math.prod(part.shape(shape)))

    def swap(self, buffers: dict[str, ShardedBuffer]) -> None:
        """All ranks between the same two steps."""
        self._steps.ask(("swap", {name: buffer.key for name, buffer in buffers.items()}))
        self._shard.swap({name: buffer.local for name, buffer in buffers.items()})

    def release(self) -> int:
        """All ranks between the same two steps."""
        self._weights.ask(
            ("staged",)
        )  # has the ranks forget what nobody here holds; else it would stay there
        return self._shard.local.release() + sum(self._steps.ask(("release_weights",)))


def _cut(whole: NDArray[np.unsignedinteger], part: Piece) -> NDArray[np.unsignedinteger]:
    return whole[tuple(slice(first, first + count) for first, count in part.block(whole.shape))]
