"""Checks of a PD pair: one engine computes the prompt, the other decodes; both get the same body with a room.

The pair is given (`--pd-peer`) or, for the embedded engine, started once beside the engine under test, with the
same model and flags.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turnout.bench.compare import equal
from turnout.bench.facts import info
from turnout.bench.registry import CapabilityAbsent, check, expect
from turnout.bench.replies import Reply, must, reply_of, rows
from turnout.bench.target import Target, request_body
from turnout.core.rng import random_id
from turnout.serving.exchange import Answer, Exchange

IDLE_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode engine; `port` is where prefill is found by decode."""

    prefill: Exchange
    decode: Exchange
    port: int

    def body(self, ids: Sequence[int], new: int, **more: Any) -> dict[str, Any]:
        """A body for both, with a room of its own."""
        where = {
            "bootstrap_host": self.prefill.address.host,
            "bootstrap_port": self.port,
            "bootstrap_room": secrets.randbits(62),
        }
        return request_body(ids, new, {**more, **where})

    async def ask(self, body: dict[str, Any]) -> tuple[Answer, Answer]:
        """What prefill and decode answer."""
        both = await asyncio.gather(*(wire.post("/generate", body) for wire in (self.prefill, self.decode)))
        return both[0], both[1]

    async def generate(self, ids: Sequence[int], new: int, **more: Any) -> Reply:
        """Decode's good answer, as a router passes it on."""
        first, answer = await self.ask(self.body(ids, new, **more))
        must(first)
        return reply_of(must(answer).row)


async def pair_of(t: Target) -> Pair:
    """The pair under test; CapabilityAbsent where none was given and none can be started."""
    if t.pair is None and t.start_pair is not None:
        t.pair = await t.start_pair()
    if t.pair is None:
        raise CapabilityAbsent("no pair was given: --pd-peer PREFILL DECODE")
    prefill, decode = t.pair
    modes = [(await info(wire, "server_info")).get("disaggregation_mode") for wire in t.pair]
    expect(modes == ["prefill", "decode"], f"the engines of the pair say that they are {modes}")
    port = (await info(prefill, "server_info")).get("disaggregation_bootstrap_port")
    expect(isinstance(port, int) and port > 0, f"prefill's bootstrap port is {port}")
    return Pair(prefill, decode, int(port or 0))


async def _idle(t: Target, pair: Pair) -> None:
    """CheckFailed unless both halves become idle and each generates a token in a new pair request."""

    async def idle() -> bool:
        found = [rows(await wire.get("/v1/loads"))["loads"] for wire in (pair.prefill, pair.decode)]
        keys = ("num_running_reqs", "num_waiting_reqs")
        return sum(int(row[key]) for loads in found for row in loads for key in keys) == 0

    await t.until("both halves idle", idle, IDLE_DEADLINE_S)
    reply = await pair.generate(t.prompt(2), 4)
    expect(
        len(reply.tokens) == 4, f"afterwards a request ends as {reply.finish} with {len(reply.tokens)} tokens"
    )


@check("pairs")
async def pair_equals_regular(t: Target) -> str:
    """Eight prompts over the pair, at once, give the tokens and log-probs of the regular engine."""
    pair = await pair_of(t)
    want = [await t.generate(ids, 16) for ids in t.prompts()]
    seen = await t.together([pair.generate(ids, 16) for ids in t.prompts()])
    told = equal(want, seen, t.facts.repeat_tolerance, "over the pair")
    await _idle(t, pair)
    return told


@check("pairs")
async def pair_of_sampled_requests(t: Target) -> str:
    """So do seeded samples, long prompts, and a response of one token (all of it prefill's)."""
    pair = await pair_of(t)
    ids = t.prompt(31, min(300, t.facts.context // 2))
    asked: list[dict[str, Any]] = [{"new": 24}, {"new": 1}]
    if t.facts.ours:
        asked.append({"new": 24, "temperature": 1.0, "sampling_seed": 9})
    want = [await t.generate(ids, **row) for row in asked]
    seen = [await pair.generate(ids, **row) for row in asked]
    expect([r.prompt_tokens for r in seen] == [len(ids)] * len(asked), "prompt tokens are miscounted")
    return f"{len(ids)} prompt tokens; {equal(want, seen, t.facts.repeat_tolerance, 'over the pair')}"


@check("pairs")
async def pair_aborted(t: Target) -> str:
    """A request that is aborted on both halves, at once or while it is decoded, ends as abort; both are free."""
    pair = await pair_of(t)
    told = []
    for steps in (0, 40):
        body = pair.body(t.prompt(6, 200), t.facts.long, rid=f"kit-{random_id()}")
        asked = asyncio.ensure_future(pair.ask(body))
        await t.clock.sleep(0.02 + steps * t.facts.token_s)
        for wire in (pair.prefill, pair.decode):
            must(await wire.post("/abort_request", {"rid": body["rid"]}))
        reply = reply_of(must((await asked)[1]).row)
        expect(reply.finish == "abort", f"decode ended as {reply.finish} after {len(reply.tokens)} tokens")
        expect(len(reply.logprobs) == len(reply.tokens), "tokens without log-probs")
        told.append(f"{len(reply.tokens)} tokens")
        await _idle(t, pair)
    return f"abort with {' and '.join(told)}; both halves free and answering"


@check("pairs")
async def pair_without_its_other_half(t: Target) -> str:
    """A request that only one half got ends as abort when that half is told so; nothing is left behind."""
    pair = await pair_of(t)
    for name, wire in (("prefill", pair.prefill), ("decode", pair.decode)):
        body = pair.body(t.prompt(7, 64), 8, rid=f"kit-{random_id()}")
        asked = asyncio.ensure_future(wire.post("/generate", body))
        await t.clock.sleep(0.2)
        expect(not asked.done() or name == "prefill", f"{name} answered alone: {asked.done()}")
        must(await wire.post("/abort_request", {"rid": body["rid"]}))
        reply = reply_of(must(await asked).row)
        expect(reply.finish == "abort" or len(reply.tokens) <= 1, f"{name} alone ended as {reply.finish}")
        expect(reply.finish != "length" or name == "prefill", f"{name} alone ended as length")
    await _idle(t, pair)
    return "prefill alone and decode alone end; both halves free and answering"
