"""Full recomputes of the digests of what is served, in the background, while requests and updates go on.

One runs at the first update that moved digests incrementally, after each update that failed, and after every
`digest_audit_interval` such updates. Promises: one at a time; it never holds an update up; tensors that are other
than attested fence the engine, whose requests end, until a full update; what was read in whole is attested so.
"""

from __future__ import annotations

import asyncio
import logging
import threading

from turnout.core.errors import WeightError
from turnout.engine.background import in_background
from turnout.engine.loop import ComputeThread

log = logging.getLogger(__name__)
DEADLINE_S = 60.0


class Audits:
    """See the module. Lives on the event loop."""

    def __init__(self, compute: ComputeThread) -> None:
        self._compute, self._interval = compute, compute.settings.digest_audit_interval
        self._since: int | None = None  # incremental updates since the last audit; None: there was none
        self._task: asyncio.Task[None] | None = None
        self._again = False
        self._stop = threading.Event()

    def updated(self, verified: str) -> None:
        """An update was put into place."""
        if verified == "full":
            self._since = 0
            return
        self._since = None if self._since is None else self._since + 1
        if self._interval and (self._since is None or self._since >= self._interval):
            self._start()

    def failed(self) -> None:
        """An update was refused or failed."""
        if self._interval:
            self._start()

    async def stop(self) -> None:
        """Ends an audit that runs."""
        self._stop.set()
        if self._task is not None:
            await self._task

    def _start(self) -> None:
        self._again = self._task is not None and not self._task.done()
        if not self._again:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while not self._stop.is_set():
            self._again, self._since = False, 0
            await self._audit()
            if not self._again:
                return

    async def _audit(self) -> None:
        weights = self._compute.core.weights
        try:
            generation = await in_background(weights.audit, self._stop)
        except WeightError as fault:
            reason = str(fault)
            log.critical("the audit of digests failed: %s", reason)
            await self._compute.do(lambda core: core.fence(reason), DEADLINE_S)
            return
        await self._compute.do(lambda core: core.audited(generation), DEADLINE_S)
