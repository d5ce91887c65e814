"""A trainer's memory given back between its steps, and taken again with the same bits.

Masters, moments and a frozen reference are kept: in a file on the disk, or in pinned host memory where the trainer
is on CUDA. Gradients mean nothing between two steps and compute weights are copies of the masters, so both are made
anew. Tensors keep their identity: their storages are emptied and filled again, and every view of them goes on.

Promises: what is freed goes back to the system (to the driver on CUDA); the file has no name, so nothing of it
outlives the process; it takes its disk space when it is made, so that a full disk is an error then. While the
memory is away `views` are the kept tensors: who only reads or replaces the state takes it from there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from turnout.core.errors import Fault, InvariantBroken, UserError
from turnout.placement.footprint import drop_pages, file_bytes, give_back, pss_bytes
from turnout.train.backend import GivenBack

CHUNK = 1 << 30  # Linux moves at most 2 GiB in one call


class _Room(Protocol):
    """Where tensors are kept; `views` are they, on the CPU, of the same shapes and dtypes."""

    views: dict[str, Tensor]

    def keep(self, name: str, tensor: Tensor) -> None: ...

    def fetch(self, name: str, tensor: Tensor) -> None: ...

    def settle(self) -> None:
        """What was kept is safe, and nothing but the room itself holds memory for it."""
        ...

    def held(self) -> int:
        """Bytes that the room and the trainer hold now where memory is short."""
        ...


class FileRoom:
    """A file without a name in `folder`, mapped for `views`, read and written as a whole through its descriptor."""

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        self._starts: dict[str, int] = {}
        size = 0
        for name, tensor in tensors.items():
            self._starts[name] = size
            size += -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"trainer-{os.getpid()}"
        self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        path.unlink()
        try:
            os.posix_fallocate(self._file, 0, size)
        except OSError as fault:
            os.close(self._file)
            raise UserError(
                Fault("--offload-train", str(folder), f"no {size} bytes for the trainer: {fault.strerror}")
            ) from fault
        self._map = mmap.mmap(self._file, size)
        self.views = {
            name: torch.frombuffer(self._map, dtype=t.dtype, count=t.numel(), offset=self._starts[name])
            for name, t in tensors.items()
        }

    def keep(self, name: str, tensor: Tensor) -> None:
        _moved(os.pwritev, self._file, tensor, self._starts[name])

    def fetch(self, name: str, tensor: Tensor) -> None:
        _moved(os.preadv, self._file, tensor, self._starts[name])

    def settle(self) -> None:
        self._map.flush()  # what was changed through `views`; the rest is the file's own
        os.fdatasync(self._file)
        self._map.madvise(mmap.MADV_DONTNEED)

    def held(self) -> int:
        return pss_bytes(os.getpid()) + file_bytes(self._file)


class PinnedRoom:
    """Pinned host memory, for a trainer on CUDA: what is short there is the device's memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.views = {
            name: torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for name, t in tensors.items()
        }

    def keep(self, name: str, tensor: Tensor) -> None:
        self.views[name].copy_(tensor)

    def fetch(self, name: str, tensor: Tensor) -> None:
        tensor.copy_(self.views[name])

    def settle(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def held(self) -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free


class Trained(Protocol):
    """The memory of a model that trains, between two of its steps."""

    @property
    def resident(self) -> Mapping[str, Tensor]:
        """What a step can't make anew: flat tensors that each fill their storage, and share it with no other."""
        ...

    @property
    def made(self) -> Sequence[Tensor]:
        """As `resident`, what is made anew."""
        ...

    @property
    def away(self) -> bool:
        """Whether the memory is given back."""
        ...

    def between_steps(self) -> bool:
        """Whether no gradient is kept for a step under way."""
        ...

    def leaves(self, kept: Mapping[str, Tensor]) -> None:
        """The memory is gone: the state is in these tensors, by the names of `resident`."""
        ...

    def comes(self) -> None:
        """The memory is there again, with what `resident` had in it."""
        ...


def filling(tensor: Tensor) -> Tensor:
    """All of the storage of a tensor, flat."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


class Offload:
    """Owns where the state of one trainer lies. Called between its steps."""

    def __init__(self, folder: Path, models: Mapping[str, Trained], frozen: Sequence[Tensor] = ()) -> None:
        """`models` are those that train, `frozen` a reference's parameters, each in a storage of its own. Raises
        UserError where the disk is full."""
        self._models = models
        still = {
            f"frozen.{i}": filling(tensor)
            for i, tensor in enumerate(frozen)
            if tensor.untyped_storage().nbytes()
        }
        self._kinds = {name: tuple(model.resident) for name, model in models.items()}
        self._state = {
            name + kind: tensor for name, model in models.items() for kind, tensor in model.resident.items()
        }
        self._kept = self._state | still
        made = [tensor for model in models.values() for tensor in model.made]
        self._sizes = [(t, t.untyped_storage().nbytes()) for t in (*self._kept.values(), *made)]
        self._on_cuda = self._sizes[0][0].device.type == "cuda"
        self._room: _Room = PinnedRoom(self._kept) if self._on_cuda else FileRoom(folder, self._kept)
        for name, tensor in still.items():
            self._room.keep(name, tensor)

    @property
    def away(self) -> bool:
        return any(model.away for model in self._models.values())

    def leave(self) -> GivenBack:
        """Keeps what is needed and frees all of it."""
        if self.away:
            raise InvariantBroken("the trainer's memory was given back already")
        if not all(model.between_steps() for model in self._models.values()):
            raise InvariantBroken("the trainer's memory is given back between two steps, not within one")
        give_back()  # what the step left behind is not what is measured
        before = self._room.held()
        for name, tensor in self._state.items():
            self._room.keep(name, tensor)
        for tensor, _ in self._sizes:
            if not self._on_cuda:
                drop_pages(tensor.data_ptr(), tensor.nbytes)
            tensor.untyped_storage().resize_(0)
        give_back()
        for name, model in self._models.items():
            model.leaves({kind: self._room.views[name + kind] for kind in self._kinds[name]})
        self.settle()
        return GivenBack(sum(size for _, size in self._sizes), before - self._room.held())

    def come(self) -> None:
        """Takes the memory again, with what was kept in it."""
        if not self.away:
            raise InvariantBroken("the trainer's memory is there already")
        for tensor, size in self._sizes:
            tensor.untyped_storage().resize_(size)
        for name, tensor in self._kept.items():
            self._room.fetch(name, tensor)
        for model in self._models.values():
            model.comes()

    def settle(self) -> None:
        """Gives back what reading or replacing the kept state has taken while it is away."""
        if self.away:
            self._room.settle()


def _moved(move: Callable[..., int], file: int, tensor: Tensor, at: int) -> None:
    """Reads or writes the bytes of a flat CPU tensor at this place of the file."""
    # not tensor.numpy(): a storage that NumPy has seen is never emptied again
    left = memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))
    while left:
        done = move(file, [left[:CHUNK]], at)
        if not done:
            raise InvariantBroken(f"the file of the trainer's state ends at byte {at}")
        left, at = left[done:], at + done
