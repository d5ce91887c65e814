"""Asks the engines that somebody else runs: what they are, what they have loaded, what they see of the folder.

Promises: engines are asked side by side, each call with a deadline; an engine that does not answer is a fact,
not an error; clients are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from turnout.core.errors import DeadlineExceeded, EngineError, EngineRefused, WeightError
from turnout.core.ports import Clock
from turnout.serving.checklist.facts import UNTOUCHED, EngineFacts
from turnout.serving.checklist.folder import Prober
from turnout.serving.client import EngineClient
from turnout.serving.discovery import NotUnderstood, info_of
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.stock_checksums import StockEngine, disagreement, stock_checksums, stock_of

Connect = Callable[[bool], EngineClient]  # a client of an engine, given whether it is a stock one


@dataclass(frozen=True)
class Look:
    """How engines are looked at. `prober` None: no folder is probed. `checkpoint`: what stock engines' checksums
    are compared with, None: they are not."""

    clock: Clock
    deadline_s: float
    prober: Prober | None
    checkpoint: Path | None

    async def at_all(self, engines: Sequence[Connect]) -> tuple[EngineFacts, ...]:
        """Facts of all, in their order."""
        return tuple(await asyncio.gather(*(self._at(connect) for connect in engines)))

    async def _at(self, connect: Connect) -> EngineFacts:
        client = connect(False)
        name, address = client.engine_id, client.address
        try:
            info, model = await client.server_info(self.deadline_s), await client.model_info(self.deadline_s)
            said = info_of(address, info, model)
        except NotUnderstood as fault:
            return EngineFacts(name, strange=str(fault))
        except EngineRefused as fault:
            return EngineFacts(name, strange=fault.reason)
        except EngineError as fault:
            return EngineFacts(name, fault.reason)
        finally:
            await client.close()
        facts = EngineFacts(name, said=said, info=info, near=is_near(address.host))
        client = connect(not said.ours)
        try:
            facts = await self._with_weights(facts, client, stock_of(said.dtype, said.device))
            if self.prober is not None:
                client.version = "none" if facts.weights is None else facts.weights.label
                shared = await self.prober.probe(client, not said.ours, _unlike(facts))
                facts = replace(facts, shared=shared)
        finally:
            await client.close()
        return facts

    async def _with_weights(
        self, facts: EngineFacts, client: EngineClient, kind: StockEngine | None
    ) -> EngineFacts:
        try:
            held = await client.attest(self.deadline_s)
        except (EngineError, DeadlineExceeded) as fault:
            return replace(facts, weights_fault=str(fault))
        differs = None
        if held.checksums and self.checkpoint is not None and kind is not None:
            differs = await asyncio.to_thread(_difference, self.checkpoint, kind, held.checksums)
        return replace(facts, weights=held, differs=differs)


def _difference(checkpoint: Path, kind: StockEngine, found: Mapping[str, str]) -> str:
    """In what a stock engine's weights are not those of a checkpoint; empty: in nothing."""
    try:
        return disagreement(stock_checksums(read_checkpoint(checkpoint), kind), found) or ""
    except WeightError as fault:
        return str(fault)


def _unlike(facts: EngineFacts) -> str:
    """Why an engine's weights are not known to be those of the checkpoint; empty: they are."""
    if facts.weights is None:
        return f"what it has loaded could not be asked: {facts.weights_fault}"
    if facts.weights.label != UNTOUCHED:
        return f"it serves {facts.weights.label}, weights of an earlier run"
    if facts.differs is None:
        return "its checksums could not be compared with the checkpoint's"
    return facts.differs


def is_near(host: str) -> bool:
    """Whether an address is one of this host."""
    with contextlib.suppress(OSError):
        family, kind, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(where)
            return True
    return False
