"""Giving memory back while the engine lives: what is released, what is stale, and proof that it is gone.

Tags are SGLang's: weights, kv_cache, cuda_graph (of which there is none on a CPU). Promises: a release returns
after the pages went back to the system, and says by how much the process shrank; released tags are remembered
and nothing else is resumed; weights that were released are stale from then on, until a full update arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turnout.core.errors import Fault, UserError
from turnout.engine.runner import Runner
from turnout.engine.weights import LiveWeights
from turnout.placement.footprint import give_back

WEIGHTS, KV_CACHE, CUDA_GRAPH = "weights", "kv_cache", "cuda_graph"
TAGS = (WEIGHTS, KV_CACHE, CUDA_GRAPH)
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Released:
    """Bytes freed by tag in all ranks, and RssAnon + RssShmem of this process, rank 0's, before and after (0: not
    Linux)."""

    freed: dict[str, int]
    resident_before: int
    resident_after: int


class Memory:
    """What of the engine's memory is given back. Owned by the compute thread."""

    def __init__(self, runner: Runner, weights: LiveWeights) -> None:
        self._runner, self._weights = runner, weights
        self.released: frozenset[str] = frozenset()
        self.stale: str | None = None  # why the weights are not to be served

    @property
    def fence(self) -> str | None:
        """Why nothing can be generated now; None where it can."""
        gone = [tag for tag in (WEIGHTS, KV_CACHE) if tag in self.released]
        return f"memory is released: {', '.join(gone)}" if gone else self.stale

    @property
    def unknown(self) -> str | None:
        """Why it is not known which weights are held; None where it is, with a KV cache or without."""
        return "the weights' memory is released" if WEIGHTS in self.released else self.stale

    def release(self, tags: Sequence[str]) -> Released:
        """Frees what is not released yet; the engine must be idle. Raises UserError for an unknown tag."""
        _check(tags)
        before = resident_bytes()
        freed = dict.fromkeys(tags, 0)
        for tag in tags:
            if tag in self.released:
                continue
            if tag == KV_CACHE:
                freed[tag] = self._runner.release_cache()
            if tag == WEIGHTS:
                freed[tag] = self._weights.release()
                self.stale = "the weights were released, so a full update is needed"
        self.released |= set(tags)
        give_back()
        return Released(freed, before, resident_bytes())

    def resume(self, tags: Sequence[str] | None) -> tuple[str, ...]:
        """Takes memory again and returns the tags; None: all that are released. The KV cache is empty then, the
        weights stale: their memory is taken by the update that brings them. Raises UserError, with nothing
        changed, for a tag that is not released."""
        wanted = tuple(tag for tag in TAGS if tag in self.released) if tags is None else tuple(tags)
        _check(wanted)
        for tag in wanted:
            if tag not in self.released:
                raise UserError(Fault("tags", tag, "is not released, so it cannot be resumed"))
        if KV_CACHE in wanted:
            self._runner.restore_cache()
        self.released -= set(wanted)
        return wanted


def resident_bytes() -> int:
    """RssAnon + RssShmem of this process; 0 where the system does not say."""
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    rows = dict(line.split(":", 1) for line in lines if ":" in line)
    return sum(int(rows[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem") if name in rows)


def _check(tags: Sequence[str]) -> None:
    for tag in tags:
        if tag not in TAGS:
            raise UserError(Fault("tags", str(tag)[:40], f"must be of {', '.join(TAGS)}"))
