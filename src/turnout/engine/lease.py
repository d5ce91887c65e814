"""Which run an engine works for that belongs to nobody: POST /lease, ours.

Promises: one run at a time; another one is refused until the lease is given back or has run out, with whose it is
and for how long; of what a holder before had begun nothing is left when a new one has it: no update, no group, no
pause. The answer tells the process, so that a run sees when another one answers in its place, and the term, which
rises with each change of holder: one that has the lease again after it ran out sees whether another had it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from turnout.core.errors import EngineBusy, Fault, UserError
from turnout.engine.control import COMMAND_DEADLINE_S, ControlCalls, told
from turnout.engine.loop import ComputeThread

SECONDS_MAX = 3600.0


class Lease:
    """Who has it, until when by a clock that only rises."""

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        self._holder = ("", -1)
        self._until = 0.0
        self.term = 0

    def take(self, run: str, incarnation: int, seconds: float, now: float) -> bool:
        """Takes or renews it for so long, 0: gives it back. Whether the holder is another than before, a later
        incarnation of its run included. Raises EngineBusy while another run, or a later incarnation, has it."""
        holder, incarnation_held = self._holder
        left = self._until - now
        mine = run == holder and incarnation >= incarnation_held
        if left > 0 and not mine:
            which = f"run {holder}, incarnation {incarnation_held}"
            reason = f"it works for {which}, which asked for it for {left:.0f} s more"
            raise EngineBusy(self._engine_id, "lease", "", reason)
        before, self._holder, self._until = self._holder, (run, incarnation), now + seconds
        self.term += before != self._holder
        return before != self._holder


class Leases(ControlCalls):
    """The handler. `forget` ends what updates a holder before had begun; `started`: when this process did."""

    def __init__(self, compute: ComputeThread, forget: Callable[[], Awaitable[None]], started: float) -> None:
        super().__init__(compute)
        self._forget, self._started = forget, started
        self._lease = Lease(self.settings.engine_id)

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/lease", self.lease)]

    async def lease(self, request: web.Request) -> web.Response:
        row = await self.row(request)
        run, incarnation, seconds = row.get("run"), row.get("incarnation"), row.get("seconds")
        if not isinstance(run, str) or not run or not isinstance(incarnation, int):
            raise UserError(Fault("run", str(run), "a lease names run and incarnation"))
        if not isinstance(seconds, int | float) or not 0 <= seconds <= SECONDS_MAX:
            raise UserError(Fault("seconds", str(seconds), f"is no time from 0 to {SECONDS_MAX:g} s"))
        return await told(self._taken(run, incarnation, float(seconds)))

    async def _taken(self, run: str, incarnation: int, seconds: float) -> dict[str, object]:
        if self._lease.take(run, incarnation, seconds, time.monotonic()):
            await self._forget()
            await self.compute.do(lambda c: c.resume(), COMMAND_DEADLINE_S)
        name, term = self.settings.engine_id, self._lease.term
        return {"engine_id": name, "pid": os.getpid(), "started_at": self._started, "term": term}
