"""What each rank of our engine takes of whole tensors, as it travels: sender and receivers lay it out so. Pure.

A rank's run of bytes is its pieces (turnout.weights.map_rules) one after another, in the order of the tensors,
without padding; a tensor of which it holds nothing is left out. Promises: both ends get the same slots from the
same names, shapes and place; a tensor without a rule is a WeightError.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from turnout.core.errors import WeightError
from turnout.weights.buckets import Slot, slots
from turnout.weights.map_rules import DERIVED, Piece, Place, piece, rule_of
from turnout.weights.tensors import HostTensor


def rank_slots(tensors: Iterable[Slot | HostTensor], place: Place) -> list[Slot]:
    """Where the pieces of whole tensors lie in the bytes for one rank; their shapes are the pieces'."""
    described = [(t, _piece(t, place)) for t in tensors]
    return slots([(t.name, t.dtype, p.shape(t.shape)) for t, p in described if p is not None], aligned=False)


def rank_bytes(bucket: Sequence[HostTensor], place: Place) -> NDArray[np.uint8]:
    """The bytes [end of the last slot] of whole tensors for one rank."""
    placed = rank_slots(bucket, place)
    data = np.empty(placed[-1].end if placed else 0, np.uint8)
    held = [(tensor, part) for tensor in bucket if (part := _piece(tensor, place)) is not None]
    for slot, (tensor, part) in zip(placed, held):
        block = tuple(slice(first, first + count) for first, count in part.block(tensor.shape))
        mine = np.ascontiguousarray(tensor.bits.reshape(tensor.shape)[block])
        data[slot.start : slot.end] = mine.reshape(-1).view(np.uint8)
    return data


def _piece(tensor: Slot | HostTensor, place: Place) -> Piece | None:
    rule = rule_of(tensor.name)
    if rule is None or rule.kind == DERIVED:
        raise WeightError(f"no rule says how {tensor.name} is divided over ranks")
    return piece(tensor.name, tensor.shape, place)
