"""Calls that change the weights: from a folder, from shared memory, through a group; prepared and activated.

Shapes of bodies and answers are SGLang 0.5.23's; an answer also names version, root digest and the length of the
pause. Promises: a refusal leaves the weights and their label as they were and answers success false.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from turnout.core.errors import WeightError
from turnout.engine import update_requests as bodies
from turnout.engine.control import COMMAND_DEADLINE_S, ControlCalls, told
from turnout.engine.core import Activated
from turnout.engine.loop import ComputeThread
from turnout.engine.parallel import ParallelRunner
from turnout.engine.parallel_update import SliceBucket
from turnout.engine.tensor_wire import read_payload
from turnout.engine.update_group import UpdateGroups
from turnout.engine.updates import Updates, check_label
from turnout.weights import delta_bucket
from turnout.weights.buckets import unpack
from turnout.weights.delta_bucket import DELTA_BUCKET

RECEIVE_SHARE = 0.8  # of the update's deadline: the call still has time to say that nothing came
DELTA_BYTES = 8  # times those of the model: int32 or int64 positions beside every element, and room to align
HANDLES_BODY_MAX = 64 << 20  # handles and descriptions of tensors, for every tensor parallel rank


class UpdateCalls(ControlCalls):
    """Handlers of weight updates."""

    def __init__(self, compute: ComputeThread) -> None:
        super().__init__(compute)
        self.updates = Updates(compute)
        runner = compute.core.runner
        self._receiver = runner.receiver if isinstance(runner, ParallelRunner) else None
        self._groups = self._receiver.own.groups if self._receiver is not None else UpdateGroups()
        self._joined_by_rank: set[str] = set()  # groups in which every rank is a member

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/update_weights_from_disk", self.from_disk),
            web.post("/begin_weight_update", self.begin),
            web.post("/end_weight_update", self.end),
            web.post("/update_weights_from_tensor", self.from_tensor),
            web.post("/init_weights_update_group", self.join),
            web.post("/update_weights_from_distributed", self.from_group),
            web.post("/destroy_weights_update_group", self.leave),
            web.post("/prepare_weights", self.prepare),
            web.post("/activate_weights", self.activate),
            web.post("/update_weight_version", self.rename),
        ]

    async def forget(self) -> None:
        """Ends what a controller that is gone had begun, and leaves its groups: nobody sends through them."""
        await self.updates.forget()
        for name in self._joined_by_rank.union(self._groups.names):
            with contextlib.suppress(WeightError):  # a rank has left already
                await self._leave({"group_name": name})

    async def from_disk(self, request: web.Request) -> web.Response:
        return await told(self._from_disk(await self.row(request)))

    async def begin(self, request: web.Request) -> web.Response:
        return await told(self._begin(await self.row(request)))

    async def end(self, request: web.Request) -> web.Response:
        return await told(self._end(await self.row(request)))

    async def from_tensor(self, request: web.Request) -> web.Response:
        return await told(self._from_tensor(await self.row(request, HANDLES_BODY_MAX)))

    async def join(self, request: web.Request) -> web.Response:
        return await told(self._join(await self.row(request)))

    async def from_group(self, request: web.Request) -> web.Response:
        return await told(self._from_group(await self.row(request, HANDLES_BODY_MAX)))

    async def leave(self, request: web.Request) -> web.Response:
        return await told(self._leave(await self.row(request)))

    async def prepare(self, request: web.Request) -> web.Response:
        return await told(self._prepare(await self.row(request)))

    async def activate(self, request: web.Request) -> web.Response:
        return await told(self._activate(await self.row(request)))

    async def rename(self, request: web.Request) -> web.Response:
        return await told(self._rename(await self.row(request)))

    async def _from_disk(self, row: dict[str, Any]) -> dict[str, Any]:
        return _activated(await self.updates.from_disk(bodies.parse_update(row, self.settings)))

    async def _begin(self, row: dict[str, Any]) -> dict[str, Any]:
        """With `base_root` (ours) changes come, relative to the weights with this root digest; else tensors."""
        base_root = bodies.parse_root(row, "base_root")
        self.updates.begin(base_root)
        what = "tensors" if base_root is None else "changes"
        return {"message": f"{what} are staged until /end_weight_update"}

    async def _end(self, row: dict[str, Any]) -> dict[str, Any]:
        """`abort` true (ours) drops what came; `root` (ours) is what must come out."""
        root = bodies.parse_root(row, "root")
        done = await self.updates.end(root, drop=row.get("abort") is True)
        return _activated(done) if done is not None else {"message": "nothing changed"}

    async def _from_tensor(self, row: dict[str, Any]) -> dict[str, Any]:
        update = bodies.parse_tensors(row)
        done = await self.updates.tensors(
            lambda: read_payload(update.entries, update.load_format), update.flags
        )
        return _activated(done) if done is not None else {"message": "staged"}

    async def _from_group(self, row: dict[str, Any]) -> dict[str, Any]:
        if row.get("load_format") == DELTA_BUCKET:
            return await self._changes_from_group(row)
        update = bodies.parse_group_update(row, 2 * self._model_bytes())
        self._groups.check(update.group)
        limit = RECEIVE_SHARE * self.settings.update_timeout_s
        if row.get("slices") is True:
            return await self._slices_from_group(update, limit)
        done = await self.updates.tensors(
            lambda: unpack(
                self._groups.receive(update.group, update.slots, update.flat, limit), update.slots
            ),
            update.flags,
        )
        return _activated(done) if done is not None else {"message": "staged"}

    async def _slices_from_group(self, update: bodies.GroupUpdate, limit_s: float) -> dict[str, Any]:
        """`slices` true (ours): the tensors are described whole, each rank gets its part from the sender."""
        receiver = self._receiver
        if receiver is None:
            raise WeightError("this engine has one rank, which takes whole tensors")

        def fill(buffers: Mapping[str, Any], twins: frozenset[str]) -> list[str]:
            bucket = SliceBucket(update.group, update.slots, twins, limit_s)
            return receiver.receive(bucket, buffers)

        await self.updates.slices(update.slots, fill, update.flags)
        return {"message": "staged"}

    async def _changes_from_group(self, row: dict[str, Any]) -> dict[str, Any]:
        update = bodies.parse_group_changes(row, DELTA_BYTES * self._model_bytes())
        self._groups.check(update.group)
        limit = RECEIVE_SHARE * self.settings.update_timeout_s
        await self.updates.changes(
            lambda: delta_bucket.unpack(
                self._groups.receive(update.group, update.parts, True, limit), update.parts
            ),
            update.flags,
        )
        return {"message": "staged"}

    async def _join(self, row: dict[str, Any]) -> dict[str, Any]:
        member = bodies.parse_membership(row)
        if member.ranks not in (1, self.settings.tp_size):
            raise WeightError(f"this engine has {self.settings.tp_size} ranks, {member.ranks} were to join")
        by_rank = self._receiver if member.ranks > 1 else None
        join = self._groups.join if by_rank is None else by_rank.join
        limit_s = self.settings.update_timeout_s
        if member.timeout_s is not None:
            limit_s = min(limit_s, member.timeout_s)
        await asyncio.to_thread(join, member, limit_s)
        if by_rank is not None:
            self._joined_by_rank.add(member.name)
        return {"message": f"rank {member.rank} of {member.world_size} in group {member.name}"}

    async def _leave(self, row: dict[str, Any]) -> dict[str, Any]:
        name = bodies.parse_group(row)
        by_rank = self._receiver if name in self._joined_by_rank else None
        self._joined_by_rank.discard(name)
        await asyncio.to_thread(self._groups.leave if by_rank is None else by_rank.leave, name)
        return {"message": f"left group {name}"}

    async def _prepare(self, row: dict[str, Any]) -> dict[str, Any]:
        held = await self.updates.prepare(bodies.parse_update(row, self.settings))
        return {
            "message": f"prepared {held.label}",
            "prepared_id": held.prepared_id,
            "version": held.label,
            "root": held.staged.root,
        }

    async def _activate(self, row: dict[str, Any]) -> dict[str, Any]:
        return _activated(await self.updates.activate(*bodies.parse_activation(row)))

    async def _rename(self, row: dict[str, Any]) -> dict[str, Any]:
        """Names the weights that are served already; a label of ours for other content is refused."""
        label, abort_all = bodies.parse_label(row)
        self.updates.check_free()
        check_label(label, self.compute.attested.root)
        if abort_all:
            await self.compute.do(lambda c: c.abort_all("the weights are renamed"), COMMAND_DEADLINE_S)
        await self.compute.do(lambda c: c.rename(label), COMMAND_DEADLINE_S)
        return {"message": f"serving {label}", "new_version": label}

    def _model_bytes(self) -> int:
        return self.compute.core.weights.nbytes


def _activated(done: Activated) -> dict[str, Any]:
    attested = done.attested
    return {
        "message": f"serving {attested.version}",
        "num_paused_requests": done.met,
        "version": attested.version,
        "root": attested.root,
        "level": attested.level,
        "verified": attested.verified,
        "pause_s": done.pause_s,
    }
