"""The tensors of a local checkpoint, mapped from its files for reading and for writing in place.

Owns the maps. Promises: a digest named here is computed from values read in the maps themselves; `preview` writes
nothing; what `write` changed is on stable storage after `flush`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from turnout.core.errors import WeightError
from turnout.weights.changes import Bits, Change
from turnout.weights.digest import Line, Sums, add, changed_sums, element_sums, finish
from turnout.weights.host_files import HostFiles
from turnout.weights.journal import Redo
from turnout.weights.safetensors_file import views
from turnout.weights.tensors import HostTensor


class MappedTensors:
    """The tensors of these safetensors files; raises WeightError for a file that is none."""

    def __init__(self, paths: Iterable[Path], files: HostFiles) -> None:
        self._files = files
        self._maps: dict[Path, NDArray[np.uint8]] = {}
        self._views: dict[str, HostTensor] = {}
        self._home: dict[str, Path] = {}
        self._sums: dict[str, Sums] = {}
        self._written: set[Path] = set()
        for path in paths:
            data = self._maps[path] = files.map(path)
            for view in views(path, data):
                self._views[view.name], self._home[view.name] = view, path

    def __iter__(self) -> Iterator[HostTensor]:
        for name, view in self._views.items():
            yield HostTensor(name, view.dtype, view.shape, self.bits(name))

    @property
    def nbytes(self) -> int:
        return sum(view.nbytes for view in self._views.values())

    def bits(self, name: str) -> Bits:
        """A tensor's patterns [elements]: a view, or a copy where the file has it unaligned."""
        bits = self._view(name).bits
        return bits if bits.flags.aligned else bits.copy()

    def lines(self) -> dict[str, Line]:
        """Dtype, shape and digest of every tensor, each read whole."""
        self._sums = {tensor.name: element_sums(tensor.bits) for tensor in self}
        return {name: self._line(name, sums) for name, sums in self._sums.items()}

    def preview(self, change: Change) -> str:
        """The digest that a tensor would have after a change. Needs `lines` before."""
        now = self.bits(change.name)[change.positions]
        moved = changed_sums(change.positions, now, change.bits)
        return self._line(change.name, add(self._sums[change.name], moved))[2]

    def write(self, redo: Redo) -> str:
        """Brings new values into the map; returns the tensor's digest then. Where the sums of the state before are
        not known, as after a kill, the tensor is read whole."""
        view = self._view(redo.name)
        if (view.dtype, view.shape) != (redo.dtype, redo.shape):
            raise WeightError(f"{redo.name} is {view.dtype} {list(view.shape)} here, the log says another")
        target = self.bits(redo.name)
        before = self._sums.pop(redo.name, None)
        self._written.add(self._home[redo.name])
        if redo.positions is None:
            sums = self._files.fill(target, redo.bits)
        else:
            moved = self._files.scatter(target, redo.change)
            sums = add(before, moved) if before is not None else element_sums(target)
        if not view.bits.flags.aligned:
            self._files.fill(view.bits, target)
        self._sums[redo.name] = sums
        return self._line(redo.name, sums)[2]

    def flush(self) -> None:
        for path in sorted(self._written):
            self._files.flush(path, self._maps[path])
        self._written.clear()

    def _view(self, name: str) -> HostTensor:
        if name not in self._views:
            raise WeightError(f"{name} is not a tensor of the local checkpoint")
        return self._views[name]

    def _line(self, name: str, sums: Sums) -> Line:
        view = self._views[name]
        return view.dtype, view.shape, finish(sums, view.dtype, view.shape)
