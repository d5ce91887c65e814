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
from turnout.train.parameters import FlatParameters

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


class Offload:
    """Owns where the state of one trainer lies: `state` of its models points there. Called between its steps."""

    def __init__(
        self, folder: Path, flats: Mapping[str, FlatParameters], frozen: Sequence[torch.nn.Parameter] = ()
    ) -> None:
        """`flats` are its models, `frozen` a reference's parameters. Raises UserError where the disk is full."""
        self._flats = flats
        for parameter in frozen:  # storages of a mapped checkpoint can't be emptied
            parameter.data = parameter.data.clone().contiguous()
        still = {f"frozen.{i}": p.data.view(-1) for i, p in enumerate(frozen)}
        self._state = {
            name + kind: tensor for name, flat in flats.items() for kind, tensor in flat.resident.items()
        }
        self._kept = self._state | still
        made = [t for flat in flats.values() for t in (flat.grad, flat.compute) if t is not flat.master]
        self._sizes = [(t, t.untyped_storage().nbytes()) for t in (*self._kept.values(), *made)]
        self._on_cuda = next(iter(flats.values())).master.device.type == "cuda"
        self._room: _Room = PinnedRoom(self._kept) if self._on_cuda else FileRoom(folder, self._kept)
        for name, tensor in still.items():
            self._room.keep(name, tensor)

    @property
    def _away(self) -> bool:
        return any(flat.away for flat in self._flats.values())

    def leave(self) -> GivenBack:
        """Keeps what is needed and frees all of it."""
        if self._away:
            raise InvariantBroken("the trainer's memory was given back already")
        if not all(slot.fresh for flat in self._flats.values() for slot in flat.slots.values()):
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
        for name, flat in self._flats.items():
            flat.state = {kind: self._room.views[name + kind] for kind in flat.resident}
        self.settle()
        return GivenBack(sum(size for _, size in self._sizes), before - self._room.held())

    def come(self) -> None:
        """Takes the memory again, with what was kept in it."""
        if not self._away:
            raise InvariantBroken("the trainer's memory is there already")
        for tensor, size in self._sizes:
            tensor.untyped_storage().resize_(size)
        for name, tensor in self._kept.items():
            self._room.fetch(name, tensor)
        for flat in self._flats.values():
            flat.state = flat.resident
            flat.grad.zero_()  # also what lies between the parameters
            flat.refresh_compute()

    def settle(self) -> None:
        """Gives back what reading or replacing the kept state has taken."""
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
