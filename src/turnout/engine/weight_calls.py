"""Calls that read, check and give back what the engine holds: tensors by name, digests, memory.

Shapes of bodies and answers are SGLang 0.5.23's, with more fields. Promises: digests and values come from the
live buffers at the time of the call; memory is given back only while nothing runs, waits or is being updated.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from aiohttp import web

from turnout.core.errors import WeightError
from turnout.engine import update_requests as bodies
from turnout.engine.background import in_background
from turnout.engine.control import COMMAND_DEADLINE_S, ControlCalls, told
from turnout.engine.loop import ComputeThread
from turnout.engine.memory import TAGS, WEIGHTS
from turnout.engine.staged import FAULTS_SHOWN
from turnout.engine.updates import Updates
from turnout.engine.weights import noise
from turnout.weights.digest import Line, root_digest
from turnout.weights.tensors import HostTensor


class WeightCalls(ControlCalls):
    """Handlers of reading, checking and memory. `updates` says whether an update is under way."""

    def __init__(self, compute: ComputeThread, updates: Updates) -> None:
        super().__init__(compute)
        self._updates = updates
        self._snapshot: dict[str, Line] | None = None

    def routes(self) -> list[web.RouteDef]:
        both = (
            ("/get_weights_by_name", self.read),
            ("/weights_checker", self.check),
            ("/release_memory_occupation", self.release),
            ("/resume_memory_occupation", self.resume),
        )
        return [route(path, handler) for path, handler in both for route in (web.post, web.get)]

    async def read(self, request: web.Request) -> web.Response:
        """The first values along a tensor's first axis, nested as the tensor is; plain JSON, as SGLang."""
        name, limit = bodies.parse_read(await self.row(request))
        try:
            self._check_loaded()
            tensor = await asyncio.to_thread(self.compute.core.weights.read, name)
        except WeightError as fault:
            return web.json_response({"error": {"message": str(fault)}}, status=400)
        return web.json_response(_values(tensor)[:limit].tolist())

    async def check(self, request: web.Request) -> web.Response:
        return await told(self._check(await self.row(request)))

    async def release(self, request: web.Request) -> web.Response:
        return await told(self._release(await self.row(request)))

    async def resume(self, request: web.Request) -> web.Response:
        return await told(self._resume(await self.row(request)))

    async def _check(self, row: dict[str, Any]) -> dict[str, Any]:
        asked = bodies.parse_check(row)
        self._check_loaded()
        if asked.action == "reset_tensors":
            return await self._updates.alone("weights_checker", lambda: self._reset(asked.skip))
        lines = await self._updates.alone("weights_checker", lambda: self._live(asked.skip))
        if asked.action == "snapshot":
            self._snapshot = lines
            return {"message": f"{len(lines)} digests kept"}
        if asked.action == "compare":
            return self._compare(lines, asked.skip)
        ours = dict.fromkeys(("tp_rank", "dp_rank", "pp_rank", "rank"), 0)
        sizes = dict.fromkeys(("tp_size", "dp_size", "pp_size", "size"), 1)
        rank = {
            "checksums": {name: line[2] for name, line in sorted(lines.items())},
            "per_gpu_checksum": root_digest(lines),
            "parallelism_info": [{"role": "target", **ours, **sizes}],
        }
        message = f"{len(lines)} digests of live tensors"
        return {"message": message, "ranks": [rank], "per_engine_checksum": root_digest(lines)}

    async def _live(self, skip: tuple[str, ...]) -> dict[str, Line]:
        found = await in_background(self.compute.core.weights.verify)
        if not found:  # an audit may have come first
            raise WeightError(f"it is not known what is held: {self.compute.core.fenced}")
        return {name: line for name, line in found.items() if not _skipped(name, skip)}

    async def _reset(self, skip: tuple[str, ...]) -> dict[str, Any]:
        """Overwrites tensors with noise, so that an update which leaves one out is found by `compare`. What is
        left is not to be served until a full update."""
        weights = self.compute.core.weights
        staged = await asyncio.to_thread(noise, weights, lambda name: _skipped(name, skip))
        await self.compute.do(lambda core: core.spoil(staged), COMMAND_DEADLINE_S)
        return {"message": "tensors hold noise; nothing is served until a full update"}

    def _compare(self, lines: dict[str, Line], skip: tuple[str, ...]) -> dict[str, Any]:
        if self._snapshot is None:
            raise WeightError("no snapshot was taken")
        kept = {name: line for name, line in self._snapshot.items() if not _skipped(name, skip)}
        other = sorted(name for name in kept.keys() | lines.keys() if kept.get(name) != lines.get(name))
        if other:
            more = f" and {len(other) - FAULTS_SHOWN} more" if len(other) > FAULTS_SHOWN else ""
            raise WeightError(f"other than in the snapshot: {', '.join(other[:FAULTS_SHOWN])}{more}")
        self._snapshot = None
        return {"message": f"{len(lines)} tensors are as in the snapshot"}

    async def _release(self, row: dict[str, Any]) -> dict[str, Any]:
        asked = bodies.parse_tags(row)
        tags = TAGS if asked is None else asked
        self._updates.check_free()
        done = await self.compute.do(lambda core: core.release_memory(tags), COMMAND_DEADLINE_S)
        if WEIGHTS in tags:
            self._updates.drop_prepared()
        return {
            "message": f"released {', '.join(tags)}",
            "freed_bytes": done.freed,
            "resident_bytes_before": done.resident_before,
            "resident_bytes": done.resident_after,
            "fell_bytes": done.resident_before - done.resident_after,
        }

    async def _resume(self, row: dict[str, Any]) -> dict[str, Any]:
        tags = bodies.parse_tags(row)
        done = await self.compute.do(lambda core: core.memory.resume(tags), COMMAND_DEADLINE_S)
        fence = self.compute.core.fenced
        return {"message": fence if fence is not None else "resumed", "resumed": list(done)}

    def _check_loaded(self) -> None:
        if WEIGHTS in self.compute.core.memory.released:
            raise WeightError("the weights' memory is released")


def _skipped(name: str, skip: tuple[str, ...]) -> bool:
    return any(part in name for part in skip)


def _values(tensor: HostTensor) -> np.ndarray:
    """float32 [shape] of a BF16 or F32 tensor."""
    wide = tensor.bits if tensor.dtype == "F32" else tensor.bits.astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32).reshape(tensor.shape)
