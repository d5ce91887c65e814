"""What the compute thread does for split requests, between two steps.

Promises: KV is written only into the pages of a request that is RECEIVING, and only when it was made by the very
weights that are served here; else the request ends as ABORT and the pages return.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnout.core.types import Finish
from turnout.engine.core import EngineCore
from turnout.engine.pd_pages import gather, kv_bytes, scatter
from turnout.engine.request_machine import KvMoved, Request, State
from turnout.protocol.pd import LinkError, Offer


@dataclass(frozen=True)
class Arrival:
    """What came from the prefill engine; `data` None where the first token ended the request."""

    offer: Offer
    data: bytearray | memoryview | None
    moved: KvMoved


def make_offer(core: EngineCore, request: Request) -> Offer:
    """The offer of a HELD request, without a way to fetch it; raises LinkError where it ended meanwhile."""
    if request.state is not State.HELD:
        raise LinkError(f"the request ended on the prefill engine: {request.message}")
    ended = request.ends or request.params.max_new_tokens == 1
    return Offer(
        token=request.output[0],
        logprob=request.logprobs[0],
        label=request.runs[0][1],
        root=request.made_by,
        seed=request.seed,
        ended=ended,
        kv_bytes=0 if ended else kv_bytes(core.runner.cache, len(request.pages)),
        cached_tokens=request.cached,
        local="",
        ticket="",
    )


def read(core: EngineCore, request: Request, out: bytearray | memoryview) -> None:
    """Copies the KV of a HELD request's prompt; raises LinkError where it ended meanwhile."""
    if request.state is not State.HELD:
        raise LinkError(f"the request ended on the prefill engine: {request.message}")
    gather(core.runner.cache, request.pages, request.prompt_tokens, out)


def release(core: EngineCore, request: Request) -> None:
    """The other side has all it needs; nothing where the request ended meanwhile."""
    if request.state is State.HELD:
        core.release(request, Finish.STOP if request.ends else Finish.LENGTH)


def offered(core: EngineCore, request: Request) -> None:
    """The prompt was computed over there; raises LinkError where the request ended here meanwhile."""
    if request.state is not State.PENDING:
        raise LinkError(f"the request ended on the decode engine: {request.message}")
    core.offer(request.rid)


def expected_bytes(core: EngineCore, request: Request) -> int:
    return kv_bytes(core.runner.cache, len(request.pages))


def attach(core: EngineCore, request: Request, arrival: Arrival) -> None:
    """Takes first token and KV over. Raises LinkError, after which the caller aborts the request, for what other
    weights made."""
    offer, served = arrival.offer, core.attested
    if request.state is not State.RECEIVING:
        raise LinkError(f"the request ended on the decode engine: {request.message}")
    if (offer.label, offer.root) != (served.version, served.root) or core.fenced is not None:
        raise LinkError(
            f"KV made by {offer.label} (root {offer.root[:16]}) is not decoded by {served.version} "
            f"(root {served.root[:16]})"
        )
    if arrival.data is not None:
        scatter(core.runner.cache, request.pages, arrival.data)
    request.seed, request.moved, request.cached = offer.seed, arrival.moved, offer.cached_tokens
    core.accept_first(request, offer.token, offer.logprob)
    if arrival.data is None and request.state is State.RUNNING:
        core.abort(request.rid, "the first token ended the request on the prefill engine, but not here")
