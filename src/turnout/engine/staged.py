"""What waits to be served: new buffers and patches, with the digests that were measured of them.

Promises: a Staged is checked and complete in itself; its digests were computed from what lies in memory, never from
what was received.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from turnout.core.errors import InvariantBroken
from turnout.engine.storage import Buffer, Prepared, Storage
from turnout.weights.digest import Line, Sums, finish, root_digest
from turnout.weights.manifest import WeightManifest

FAULTS_SHOWN = 8


@dataclass(frozen=True)
class Measured:
    """One tensor's line, and the digest's sums that it was made of."""

    line: Line
    sums: Sums


@dataclass(frozen=True)
class Patches:
    """Elements to write into live buffers: the names of the tensors in order, and what writing must move the sums
    of their digests by."""

    prepared: Prepared
    names: list[str]
    moves: list[Sums]


@dataclass(frozen=True)
class Staged:
    """New weights, checked and not yet served: new `buffers`, and `patches` of others. `measured` is what is served
    then; `full`: every tensor is new. `generation` is that of the live weights they were staged beside."""

    buffers: dict[str, Buffer]
    measured: dict[str, Measured]
    full: bool
    generation: int
    manifest: WeightManifest | None = None
    patches: Patches | None = None
    root: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", root_digest(self.lines))

    @property
    def lines(self) -> dict[str, Line]:
        return {name: measured.line for name, measured in self.measured.items()}

    @property
    def nothing(self) -> bool:
        """Whether the weights stay as they are."""
        return not self.buffers and self.patches is None


def measure(storage: Storage, buffer: Buffer, name: str, dtype: str) -> Measured:
    """A tensor in the dtype it was stored in; in the live dtype where it does not fit that exactly."""
    spec = storage.specs[name]
    sums = storage.sums(buffer, name, dtype)
    if sums is None:
        dtype, sums = spec.dtype, storage.sums(buffer, name, spec.dtype)
    if sums is None:
        raise InvariantBroken(f"{name} does not fit its own dtype {spec.dtype}")
    return measured_as(dtype, spec.shape, sums)


def measured_as(dtype: str, shape: tuple[int, ...], sums: Sums) -> Measured:
    """A tensor whose digest has these sums."""
    return Measured((dtype, shape, finish(sums, dtype, shape)), sums)


def shown(items: list[str], between: str = ", ") -> str:
    """The first few."""
    more = f"{between}and {len(items) - FAULTS_SHOWN} more" if len(items) > FAULTS_SHOWN else ""
    return between.join(items[:FAULTS_SHOWN]) + more
