"""PD disaggregation: this engine as one half of a pair, see docs/guides/pd.md.

Owns the companions of split requests, one task each, which live as long as the HTTP call that brought them.
Promises: a request to one half is refused unless it names the other half and a room; when `attend` is left every
companion has ended, with the other side told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from turnout.core.errors import ConfigError, Fault
from turnout.engine.loop import ComputeThread
from turnout.engine.pd_decode import DecodeSide
from turnout.engine.pd_prefill import PrefillSide
from turnout.engine.pd_side import Companion
from turnout.engine.request_machine import Request, State
from turnout.engine.requests import BadRequest
from turnout.protocol.pd import Bootstrap


class Disaggregation:
    """See the module. A no-op where `disaggregation_mode` is null."""

    def __init__(self, compute: ComputeThread) -> None:
        self.mode = compute.settings.disaggregation_mode
        self.bootstrap_port: int | None = None
        self._side: PrefillSide | DecodeSide | None = None
        if self.mode == "prefill":
            self._side = PrefillSide(compute)
        elif self.mode == "decode":
            self._side = DecodeSide(compute)
        self._companions: dict[str, Companion] = {}
        loop = asyncio.get_running_loop()

        def phase(request: Request) -> None:  # on the compute thread
            loop.call_soon_threadsafe(self._saw, request, request.state)

        compute.core.on_phase = phase

    async def start(self) -> None:
        """Raises ConfigError where the bootstrap port can't be had."""
        if self._side is None:
            return
        try:
            port = await self._side.start()
        except OSError as fault:
            raise ConfigError(Fault("engine.disaggregation_bootstrap_port", "", str(fault))) from fault
        self.bootstrap_port = port if self.mode == "prefill" else None

    async def stop(self) -> None:
        if self._side is not None:
            await self._side.stop()

    def info(self) -> dict[str, Any]:
        """For /server_info."""
        row: dict[str, Any] = {"disaggregation_mode": self.mode}
        if self.bootstrap_port is not None:
            row["disaggregation_bootstrap_port"] = self.bootstrap_port
        if self._side is not None:
            row["disaggregation"] = {
                **vars(self._side.counters),
                "split_requests": len(self._companions),
            }
        return row

    @asynccontextmanager
    async def attend(self, row: dict[str, Any], requests: Sequence[Request]) -> AsyncIterator[None]:
        """Around the submission and the whole life of the requests of one body. Raises BadRequest."""
        if self._side is None:
            yield
            return
        faults: list[Fault] = []
        split = [request for request in requests if request.params.max_new_tokens > 0]
        for request in split:
            request.bootstrap = Bootstrap.of(row, requests.index(request), faults)
        if faults:
            remedy = f"this is the {self.mode} half of a pair: send requests through a router"
            raise BadRequest([*faults, Fault("disaggregation_mode", self.mode, "needs these fields", remedy)])
        opened: list[Companion] = []
        try:
            for request in split:
                if request.rid in self._companions:
                    raise BadRequest(Fault("rid", request.rid, "is in use by a request that still runs"))
                opened.append(await self._side.open(request))
                self._companions[request.rid] = opened[-1]
            for companion in opened:
                companion.task = asyncio.create_task(companion.run(self._side.steps))
            yield
        finally:
            for companion in opened:
                del self._companions[companion.request.rid]
                companion.left()
            await asyncio.gather(*[c.task for c in opened if c.task is not None], return_exceptions=True)
            for companion in opened:
                await self._side.close(companion)

    def _saw(self, request: Request, state: State) -> None:
        companion = self._companions.get(request.rid)
        if companion is not None and companion.request is request:
            companion.saw(state)
