"""The engine under test, as checks see it: what it says of itself, calls to it, and waiting for what it does.

Promises: every wait has a deadline; only HTTP is
used; no call that a check began outlives it; a request of a check carries an id that no other has.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnout.bench.reference import Reference
from turnout.bench.registry import CheckFailed
from turnout.bench.replies import Reply, must, reply_of, rows
from turnout.bench.versions import ModelVersion
from turnout.core.ports import Clock
from turnout.core.rng import random_id
from turnout.serving.exchange import Answer, Exchange

POLL_S = 0.02
EVENT_DEADLINE_S = 30.0
LONG_MAX = 3000

Fresh = Callable[[ModelVersion], Awaitable[Exchange]]


@dataclass(frozen=True)
class Facts:
    """What the engine says of itself. `ours` is whether it is the embedded engine, which promises more than
    SGLang: results that do not depend on company, bit for bit. `token_s` is the measured time of one decode
    step; `label` the weight version that was served when the suite began; `tp` its tensor parallel ranks; `pid`
    its process, where it runs on this host and says so, else 0."""

    context: int
    vocabulary: int
    eos_ids: tuple[int, ...]
    dtype: str
    label: str
    max_running: int
    ours: bool
    token_s: float = 0.02
    tp: int = 1
    pid: int = 0

    @property
    def long(self) -> int:
        """New tokens of a request that is meant not to end by itself while a check looks at it."""
        return min(self.context - 256, LONG_MAX)

    @property
    def lasting(self) -> int:
        """New tokens of a request that lasts long enough to be met while it runs: most of a second."""
        return max(64, min(self.long, int(0.7 / self.token_s)))

    @property
    def tolerance(self) -> float:
        """Largest difference of two log-probs of one token between two correct computations."""
        return 2e-3 if self.dtype == "float32" else 0.12

    @property
    def repeat_tolerance(self) -> float:
        """Largest difference of two answers of this engine to one question; 0 where it promises bits."""
        return 0.0 if self.ours else self.tolerance


@dataclass
class Target:
    """One engine. `fresh` starts another one on a version and returns calls to it, None where that cannot be
    done; `pair` are the prefill and the decode half of a PD pair, `start_pair` starts one; `versions` are the
    checkpoint folders: the original first, then two others; `wanted` keeps what each answers, by root."""

    wire: Exchange
    clock: Clock
    facts: Facts
    reference: Reference
    versions: tuple[ModelVersion, ...]
    work: Path
    fresh: Fresh | None = None
    pair: tuple[Exchange, Exchange] | None = None
    start_pair: Callable[[], Awaitable[tuple[Exchange, Exchange]]] | None = None
    token: str | None = None
    wanted: dict[str, list[Reply]] = field(default_factory=dict)

    def prompt(self, seed: int, length: int = 12) -> list[int]:
        """Token ids that depend on these two only; no end id and none of the first ids is among them."""
        span = min(self.facts.vocabulary, 256) - 16
        ids, state = [], seed * 2654435761 + 12345
        for _ in range(length):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            ids.append(16 + (state >> 33) % span)
        return [i if i not in self.facts.eos_ids else 16 for i in ids]

    def prompts(self, count: int = 8) -> list[list[int]]:
        """Prompts of different lengths."""
        return [self.prompt(seed, 3 + 9 * seed) for seed in range(count)]

    async def ask(self, ids: Sequence[int], new: int = 8, **more: Any) -> Answer:
        """One /generate, answered in whatever way. Keywords are sampling parameters; those that belong to the
        request (rid, text, extra_key and so on) are moved there."""
        return await self.wire.post("/generate", request_body(ids, new, more))

    async def generate(self, ids: Sequence[int], new: int = 8, **more: Any) -> Reply:
        """One good generation; greedy and to full length unless told otherwise."""
        return reply_of(must(await self.ask(ids, new, **more)).row)

    async def together(self, asked: Sequence[Awaitable[Reply]]) -> list[Reply]:
        return list(await asyncio.gather(*asked))

    async def load(self) -> dict[str, int]:
        """Counts of running and waiting requests, summed over the ranks of /v1/loads."""
        found = rows(await self.wire.get("/v1/loads"))["loads"]
        keys = ("num_running_reqs", "num_waiting_reqs")
        return {key: sum(int(row[key]) for row in found) for key in keys}

    async def until(self, what: str, done: Callable[[], Awaitable[bool]], deadline_s: float = 30.0) -> None:
        """Polls until `done()`; CheckFailed that names `what` at the deadline."""
        end = self.clock.now() + deadline_s
        while not await done():
            if self.clock.now() > end:
                raise CheckFailed(f"{what}: not within {deadline_s:g} s")
            await self.clock.sleep(POLL_S)

    async def until_running(self, count: int) -> None:
        """Returns when this many requests run, and have had the time for a few tokens."""

        async def run() -> bool:
            return (await self.load())["num_running_reqs"] >= count

        await self.until(f"{count} requests running", run)
        await self.clock.sleep(12 * self.facts.token_s)

    async def until_idle(self, deadline_s: float = 30.0) -> None:
        async def idle() -> bool:
            return sum((await self.load()).values()) == 0

        await self.until("the engine to be idle", idle, deadline_s)

    async def until_freed(self) -> str:
        """Evidence that a request of full length whose client has just left was ended, not run to its end."""
        begun = self.clock.now()
        await self.until_idle()
        took, whole = self.clock.now() - begun, self.facts.long * self.facts.token_s
        if took > whole / 2:
            raise CheckFailed(f"idle only {took:.1f} s after the client left; its tokens take {whole:.1f} s")
        return f"idle {took:.2f} s after the client left, {whole:.1f} s before its end"

    @contextlib.asynccontextmanager
    async def flight(self, ids: Sequence[int], new: int, **more: Any) -> AsyncIterator[Flight]:
        """A request on its way while the block runs; it is given up (the client hangs up) when the block
        ends with an error."""
        rid = str(more.pop("rid", f"kit-{random_id()}"))
        task = asyncio.ensure_future(self.ask(ids, new, rid=rid, **more))
        try:
            yield Flight(rid, task)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})

    async def control(self, path: str, body: Any) -> dict[str, Any]:
        """A control call that must succeed; its JSON object, {} for an empty body."""
        answer = must(await self.wire.post(path, body))
        row = answer.row
        if isinstance(row, dict) and row.get("success") is False:
            raise CheckFailed(f"{path} answered success false with 200: {answer.message}")
        return row if isinstance(row, dict) else {}

    @contextlib.asynccontextmanager
    async def on(self, version: ModelVersion, **more: Any) -> AsyncIterator[None]:
        """The block runs on this version, loaded from disk; the first one is loaded again in every case."""
        try:
            await self.load_version(version, **more)
            yield
        finally:
            await self.load_version(self.versions[0])

    @contextlib.asynccontextmanager
    async def paused(self, mode: str) -> AsyncIterator[None]:
        """The block runs while generation is paused; it goes on afterwards in every case."""
        await self.control("/pause_generation", {"mode": mode})
        try:
            yield
        finally:
            await self.control("/continue_generation", {})

    async def abort(self, rid: str) -> None:
        await self.control("/abort_request", {"rid": rid})

    async def load_version(self, version: ModelVersion, **more: Any) -> dict[str, Any]:
        """Loads a version from disk, all behaviour flags said."""
        return await self.control("/update_weights_from_disk", disk_body(version, **more))


@dataclass(frozen=True)
class Flight:
    """A request on its way."""

    rid: str
    task: asyncio.Task[Answer]

    @property
    def landed(self) -> bool:
        return self.task.done()

    async def answer(self) -> Answer:
        return await asyncio.shield(self.task)

    async def reply(self) -> Reply:
        return reply_of(must(await self.answer()).row)


_OF_THE_REQUEST = (
    "rid", "text", "stream", "extra_key", "return_logprob", "logprob_start_len", "novel",
    "return_routed_experts", "routed_experts_start_len",
)  # fmt: skip
_PD = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


def request_body(ids: Sequence[int], new: int, more: dict[str, Any]) -> dict[str, Any]:
    """The body of one /generate: greedy, ignoring end ids, with log-probs and an id, unless told otherwise."""
    params = {"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True}
    body: dict[str, Any] = {"rid": f"kit-{random_id()}", "return_logprob": True, "sampling_params": params}
    if "text" not in more:
        body["input_ids"] = list(ids)
    for name, value in more.items():
        (body if name in _OF_THE_REQUEST + _PD else params)[name] = value
    return body


def disk_body(version: ModelVersion, **more: Any) -> dict[str, Any]:
    """The body of one /update_weights_from_disk."""
    return {
        "model_path": str(version.folder),
        "load_format": "auto",
        "weight_version": version.label,
        "abort_all_requests": False,
        "flush_cache": True,
    } | more
