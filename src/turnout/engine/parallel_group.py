"""The group of ranks that compute one model: sums and gathers of tensors between their processes, over Gloo.

Promises: a sum has the same bits on every rank and, element by element, does not depend on where the element lies
(a ring all-reduce adds ranks in an order that depends on the position, which would make a row's bits depend on its
batch), so results stay independent of the batch; each call ends within the group's deadline or raises RuntimeError,
as torch does, also where a rank is gone. All ranks must make the same calls in the same order.
"""

from __future__ import annotations

import datetime
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import FileStore

from turnout.engine.gloo import gloo_end

LOOPBACK = "127.0.0.1"  # all ranks are processes of one machine


class Group:
    """One process's end. Not thread-safe: it belongs to the thread that computes."""

    def __init__(self, store: Path, rank: int, size: int, deadline_s: float) -> None:
        """Meets the other ranks through the file `store`; raises RuntimeError where they do not come in time."""
        self.rank, self.size = rank, size
        limit = datetime.timedelta(seconds=deadline_s)
        self._group = gloo_end(FileStore(str(store), size), (rank, size), LOOPBACK, limit)
        if float(self.add(torch.ones(1))) != size:
            raise RuntimeError("the first sum over the ranks was wrong")

    def limit(self, deadline_s: float) -> None:
        """Every later call must end within so many seconds."""
        self._group.set_timeout(datetime.timedelta(seconds=deadline_s))

    def add(self, part: Tensor) -> Tensor:
        """The sum of every rank's `part` (same shape and dtype), in rank order, rounded once to its dtype. May
        write into `part`."""
        part = part.contiguous()
        if self.size == 2:  # a sum of two has one order only
            self._group.allreduce([part]).wait()
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self._group.allgather([parts], [part]).wait()
        total = parts[0].float()
        for other in parts[1:]:
            total += other.float()
        return total.to(part.dtype)

    def gather_columns(self, part: Tensor) -> Tensor:
        """At rank 0: every rank's [rows, n] beside one another, [rows, size * n]. Elsewhere `part` itself."""
        part = part.contiguous()
        if self.rank:
            self._group.gather([], [part]).wait()
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self._group.gather([parts], [part]).wait()
        return torch.cat(parts, dim=1)
