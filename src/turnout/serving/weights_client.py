"""Calls that move weights into one engine, in the shapes of SGLang 0.5.23. No tensor travels in them.

Promises: all behaviour flags are sent, since engines differ in their defaults; an answer that does not say success
is an EngineError; `drop` and `leave`, which tidy up after a failure, never raise.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from turnout.core.errors import EngineError
from turnout.serving.client import EngineClient
from turnout.weights.buckets import TORCH_NAMES, Slot
from turnout.weights.delta_bucket import DELTA_BUCKET, Part
from turnout.weights.manifest import FORMAT, FORMAT_VERSION
from turnout.weights.map_rules import Place

log = logging.getLogger(__name__)
FLATTENED = "flattened_bucket"
WEIGHT_TAGS, CACHE_TAGS = ("weights",), ("kv_cache", "cuda_graph")  # of an engine's memory
DELTA_FORMATS = {  # what an engine must announce to take deltas, by transport
    "disk": f"{FORMAT}/{FORMAT_VERSION}",
    "group": DELTA_BUCKET,
}


class OnUpdate(StrEnum):
    """What putting weights into place does to requests in flight (--on-weight-update): none may be there; they end
    with what they have; their KV is computed again on the new weights; they go on with the KV that they have."""

    DRAIN = "drain"
    ABORT = "abort"
    RETRACT = "retract"
    CONTINUE = "continue"

    @property
    def flags(self) -> dict[str, bool]:
        return {"abort_all_requests": self is OnUpdate.ABORT, "flush_cache": self is not OnUpdate.CONTINUE}


@dataclass(frozen=True)
class BucketFlags:
    """`label` names the version, with its last bucket only, and `requests` (None in those before: nothing) what
    happens to requests in flight then."""

    label: str | None
    requests: OnUpdate | None
    deadline_s: float


@dataclass(frozen=True)
class Meeting:
    """Where and as which rank an engine joins a group; its further ranks follow on `rank`. `ranks`: how many of
    ours join; 1: the engine, which hands on to them itself."""

    group: str
    host: str
    port: int
    rank: int
    world_size: int
    ranks: int = 1


class EngineWeights:
    """The weight calls of one engine."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self._ranks: int | None = None

    async def ranks(self) -> int:
        """How many receivers the engine is: one where it is ours, which hands on to its ranks itself; of SGLang,
        every tensor parallel rank."""
        if self._ranks is None:
            info = await self.client.server_info()
            size = 1 if info.get("engine") == "turnout" else info.get("tp_size", 1)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise self.client.fault(EngineError, "update", f"tp_size {size!r} is not understood")
            self._ranks = size
        return self._ranks

    async def places(self) -> list[Place]:
        """Of an engine whose ranks can each be a member of a group and take their part: which part. Else none."""
        row = (await self.client.server_info()).get("weight_slices")
        if row is None:
            return []
        try:
            tp, ep, experts = (int(row[name]) for name in ("tp_size", "ep_size", "experts"))
        except (TypeError, KeyError, ValueError) as fault:
            what = f"weight_slices {row!r} is not understood"
            raise self.client.fault(EngineError, "update", what) from fault
        return [Place(rank, tp, ep, experts) for rank in range(tp)]

    async def prepare(self, folder: str, label: str, deadline_s: float, load_format: str = "auto") -> str:
        """Has the engine stage a folder beside what it serves; returns the id to `activate` it by. `load_format`
        "delta" (ours): the folder holds what changed."""
        body = {"model_path": folder, "weight_version": label, "load_format": load_format}
        row = await self._succeed("/prepare_weights", body, deadline_s)
        prepared = row.get("prepared_id")
        if not isinstance(prepared, str) or not prepared:
            raise self.client.fault(EngineError, "update", f"/prepare_weights named no set: {row!r}")
        return prepared

    async def activate(
        self, prepared_id: str, deadline_s: float, requests: OnUpdate = OnUpdate.DRAIN
    ) -> None:
        """Has the engine put a prepared set into place."""
        body = {"prepared_id": prepared_id, **requests.flags}
        await self._succeed("/activate_weights", body, deadline_s)

    async def live_root(self, deadline_s: float) -> str:
        """The root digest that the engine computes anew from all its live tensors."""
        row = await self._succeed("/weights_checker", {"action": "checksum"}, deadline_s)
        root = row.get("per_engine_checksum")
        if not isinstance(root, str):
            raise self.client.fault(
                EngineError, "attest", f"/weights_checker named no root: {str(row)[:200]}"
            )
        return root

    async def begin(self, deadline_s: float, base_root: str | None = None) -> None:
        """`base_root` (ours): what the changes to come are relative to; an engine with another root refuses."""
        await self._succeed("/begin_weight_update", _given(base_root=base_root), deadline_s)

    async def end(self, deadline_s: float, root: str | None = None) -> None:
        """Has the engine put into place what came since `begin`; `root` (ours): what must come out, checked
        before anything is written."""
        await self._succeed("/end_weight_update", _given(root=root), deadline_s)

    async def drop(self, deadline_s: float) -> None:
        """Ends a begun update without it: ours forgets what came, a stock SGLang holds unknown weights then."""
        with contextlib.suppress(EngineError):
            await self.client.control("/end_weight_update", {"abort": True}, deadline_s)

    async def tensors(self, payload: str, flags: BucketFlags) -> None:
        """One flattened bucket as a pickle of shared-memory handles; every rank reads the same."""
        body = {"serialized_named_tensors": [payload] * await self.ranks(), **_flags(flags)}
        await self._succeed("/update_weights_from_tensor", body, flags.deadline_s)

    async def join(self, meeting: Meeting, deadline_s: float) -> None:
        body = {
            "master_address": meeting.host,
            "master_port": meeting.port,
            "rank_offset": meeting.rank,
            "world_size": meeting.world_size,
            "group_name": meeting.group,
            "backend": "gloo",
            **({"ranks": meeting.ranks} if meeting.ranks > 1 else {}),
            **(
                {"timeout_s": deadline_s} if self.client.stages else {}
            ),  # ours: it gives up when the caller does
        }
        await self._succeed("/init_weights_update_group", body, deadline_s)

    async def through_group(
        self, group: str, slots: Sequence[Slot], flags: BucketFlags, by_rank: bool = False
    ) -> None:
        """Has the engine receive one flattened bucket; returns when it has. `by_rank` (ours): each of its ranks
        gets its part (turnout.weights.slices); `slots` describe whole tensors all the same."""
        body = {
            "names": [slot.name for slot in slots],
            "dtypes": [TORCH_NAMES[slot.dtype] for slot in slots],
            "shapes": [list(slot.shape) for slot in slots],
            "group_name": group,
            **_flags(flags),
            **({"slices": True} if by_rank else {}),
        }
        await self._succeed("/update_weights_from_distributed", body, flags.deadline_s)

    async def changes_through_group(self, group: str, parts: Sequence[Part], flags: BucketFlags) -> None:
        """Has the engine receive one bucket of changes (turnout.weights.delta_bucket); returns when it has. Ours:
        for engines that announce DELTA_BUCKET in `delta_formats` of /server_info, between `begin` with a base root
        and `end`."""
        body = {
            "names": [part.name for part in parts],
            "dtypes": [TORCH_NAMES[part.dtype] for part in parts],
            "shapes": [list(part.shape) for part in parts],
            "counts": [part.count for part in parts],
            "group_name": group,
            **_flags(flags),
            "load_format": DELTA_BUCKET,
        }
        await self._succeed("/update_weights_from_distributed", body, flags.deadline_s)

    async def from_ipc(
        self, sockets: dict[str, str], label: str, requests: OnUpdate, deadline_s: float
    ) -> None:
        """Has a stock SGLang take one whole update from checkpoint-engine's sender at these ZeroMQ sockets, by
        device uuid; returns when it serves it."""
        flush = requests.flags["flush_cache"]
        body = {"zmq_handles": sockets, "flush_cache": flush, "weight_version": label}
        await self._succeed("/update_weights_from_ipc", body, deadline_s)

    async def release_memory(self, tags: Collection[str], deadline_s: float) -> int:
        """Has an idle engine give back the memory of these tags, of which it gave none back before; how many bytes
        it says that is (0: it does not say)."""
        row = await self._memory("/release_memory_occupation", tags, deadline_s)
        freed = row.get("freed_bytes")
        return sum(freed.values()) if isinstance(freed, dict) else 0

    async def resume_memory(self, tags: Collection[str], deadline_s: float) -> None:
        """Has it take the memory of tags that it gave back; what was in there is gone."""
        await self._memory("/resume_memory_occupation", tags, deadline_s)

    async def _memory(self, path: str, tags: Collection[str], deadline_s: float) -> dict[str, Any]:
        """A stock SGLang answers `null`."""
        row = await self.client.control(path, {"tags": sorted(tags)}, deadline_s)
        if row is not None and (not isinstance(row, dict) or row.get("success") is not True):
            message = row.get("message", row) if isinstance(row, dict) else row
            raise self.client.fault(EngineError, "memory", f"{path}: {message}")
        return {} if row is None else row

    async def leave(self, group: str, deadline_s: float) -> None:
        try:
            await self.client.control("/destroy_weights_update_group", {"group_name": group}, deadline_s)
        except EngineError as fault:
            log.info("group %s was not left: %s", group, fault)

    async def _succeed(self, path: str, body: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        row = await self.client.control(path, body, deadline_s)
        if not isinstance(row, dict) or row.get("success") is not True:
            message = row.get("message", row) if isinstance(row, dict) else row
            raise self.client.fault(EngineError, "update", f"{path}: {message}")
        return row


@contextlib.asynccontextmanager
async def standing_still(
    engines: Sequence[EngineClient], requests: OnUpdate, deadline_s: float
) -> AsyncIterator[None]:
    """Stock engines among these make no token inside the block: SGLang lets an update wait for the end of requests
    in flight unless it is paused before, and its mode says what becomes of them. Raises EngineError. The embedded
    engine puts weights into place between two steps and needs no pause."""
    modes = {OnUpdate.ABORT: "abort", OnUpdate.RETRACT: "retract", OnUpdate.CONTINUE: "in_place"}
    stock = [engine for engine in engines if not engine.stages and requests in modes]
    try:
        for engine in stock:
            await engine.control("/pause_generation", {"mode": modes[requests]}, deadline_s)
        yield
    finally:
        for engine in stock:
            with contextlib.suppress(EngineError):  # one that does not answer is fenced by its attestation
                await engine.control("/continue_generation", {}, deadline_s)


def _given(**fields: str | None) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _flags(flags: BucketFlags) -> dict[str, Any]:
    named = {} if flags.label is None else {"weight_version": flags.label}
    requests = (
        {"flush_cache": False, "abort_all_requests": False}
        if flags.requests is None
        else flags.requests.flags
    )
    return {"load_format": FLATTENED, **requests, **named}
