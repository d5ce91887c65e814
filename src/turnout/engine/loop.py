"""The compute thread: the one owner of EngineCore. Commands come in through a bounded queue and act between
steps; results go back to the event loop by call_soon_threadsafe, once per step for all requests: it never blocks.

Promises: a command that was accepted is answered, or the process ends: a crash of this thread is logged in
one line and ends the process with status 70, since an engine that cannot compute must not look alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import torch

from turnout.core.errors import EngineBusy, Fault, TurnoutError, UserError
from turnout.engine.calls import Call
from turnout.engine.core import Attested, EngineCore, Load
from turnout.engine.model import LoadedModel
from turnout.engine.request_machine import Request
from turnout.engine.settings import EngineSettings
from turnout.placement.processes import collector_off

log = logging.getLogger(__name__)
T = TypeVar("T")
QUEUE_LIMIT = 16384
IDLE_WAIT_S = 1.0
START_DEADLINE_S = 600.0
GRACE_S = 30.0  # beyond a request's deadline: for the abort, and for the client to read the rest
CRASH_STATUS = 70


class ComputeThread:
    """See the module. All public methods are called on the event loop that made it."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.beat = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._commands: queue.Queue[tuple[Callable[[EngineCore], Any], asyncio.Future[Any]] | None]
        self._commands = queue.Queue(QUEUE_LIMIT)
        self._calls: dict[str, Call] = {}  # by request id
        self._streams: set[Call] = set()  # those that want to hear of every step
        self._over: list[Request] = []  # ended, and not yet told to the event loop; the thread's own
        self._told = False  # a message is under way that the event loop has not read yet
        self._started: asyncio.Future[EngineCore] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, name="turnout-compute", daemon=True)
        self._core: EngineCore | None = None

    async def start(self) -> None:
        """Loads the model on the compute thread; raises what loading raised."""
        self._thread.start()
        self._core = await asyncio.wait_for(self._started, START_DEADLINE_S)

    async def stop(self, deadline_s: float) -> None:
        """Ends the thread after its current step; requests in flight stay unanswered."""
        with contextlib.suppress(queue.Full):  # then the thread, a daemon, ends with the process
            self._commands.put_nowait(None)
        await asyncio.to_thread(self._thread.join, deadline_s)

    @property
    def core(self) -> EngineCore:
        """For reading what is replaced as a whole: `attested`, `load`, `fenced`, `model`."""
        if self._core is None:
            raise RuntimeError("the compute thread was not started")
        return self._core

    @property
    def attested(self) -> Attested:
        return self.core.attested

    @property
    def load(self) -> Load:
        return self.core.load

    @property
    def model(self) -> LoadedModel:
        return self.core.model

    async def do(self, work: Callable[[EngineCore], T], deadline_s: float) -> T:
        """Runs `work` between two steps; raises what it raised, EngineBusy where the queue is full."""
        future: asyncio.Future[T] = self._loop.create_future()
        try:
            self._commands.put_nowait((work, future))
        except queue.Full:
            raise EngineBusy(
                self.settings.engine_id, "queue", self.attested.version, f"{QUEUE_LIMIT} commands wait"
            ) from None
        return await asyncio.wait_for(future, deadline_s)

    @contextlib.asynccontextmanager
    async def call(
        self, requests: Sequence[Request], deadline_s: float, stream: bool = False
    ) -> AsyncIterator[Call]:
        """Submits all the requests or none; what has not ended when the block is left (its client went away)
        is aborted, so that its pages return. At the deadline they are aborted and end with what exists. Raises
        UserError for an id that is in use, EngineBusy, and TimeoutError GRACE_S after the deadline."""
        for request in requests:
            if request.rid in self._calls:
                raise UserError(Fault("rid", request.rid, "is in use by a request that still runs"))
        call = Call(requests)
        self._calls.update((request.rid, call) for request in requests)
        if stream:
            self._streams.add(call)
        late = self._loop.call_later(
            deadline_s, lambda: self._abandon(call.running, f"deadline of {deadline_s:g} s")
        )
        refused = False
        try:
            async with asyncio.timeout(deadline_s + GRACE_S):
                try:
                    await self.do(lambda core: _submit(core, requests), deadline_s)
                except TurnoutError:
                    refused = True
                    raise
                yield call
        finally:
            late.cancel()
            self._streams.discard(call)
            for request in requests:
                del self._calls[request.rid]
            if call.running and not refused:
                self._abandon(call.running, "the client went away")

    async def generate(self, request: Request, deadline_s: float) -> Request:
        """The request, ended; see `call`."""
        async with self.call([request], deadline_s) as call:
            await call.ended()
        return request

    def _abandon(self, rids: list[str], message: str) -> None:
        def abort(core: EngineCore) -> None:
            for rid in rids:
                core.abort(rid, message)

        try:
            self._commands.put_nowait((abort, self._loop.create_future()))
        except queue.Full:
            log.warning("requests %s run to their end (%s): %d commands wait", rids, message, QUEUE_LIMIT)

    def _publish(self, stepped: bool) -> None:
        """Tells the event loop what ended, and that tokens came where somebody wants them as they come; one
        message at a time is enough, since it says only that there is news."""
        if self._over or (stepped and self._streams and not self._told):
            over, self._over, self._told = self._over, [], True
            self._loop.call_soon_threadsafe(self._deliver, over)

    def _deliver(self, over: list[Request]) -> None:
        self._told = False  # first: a token that comes from here on gets a message of its own
        for request in over:
            call = self._calls.get(request.rid)
            if call is not None:
                call.over(request)
        for call in self._streams:
            call.tell()

    def _over_with(self, request: Request) -> None:
        self._over.append(request)

    def _main(self) -> None:
        try:
            torch.set_num_threads(self.settings.threads)
            try:
                with collector_off():
                    core = EngineCore.build(self.settings, self._over_with)
            except (TurnoutError, OSError) as fault:
                self._post(self._started, None, fault)
                return
            gc.freeze()  # what loading left is not looked through again: that took 5 % of a decode step
            self._post(self._started, core, None)
            self._run(core)
            core.close()
        except BaseException as fault:  # whatever it is, the process must not go on without this thread
            log.critical(
                "compute thread of engine %s died: %r", self.settings.engine_id, fault, exc_info=fault
            )
            logging.shutdown()
            os._exit(CRASH_STATUS)

    def _run(self, core: EngineCore) -> None:
        worked = True
        while True:
            self.beat = time.monotonic()
            try:
                command = self._commands.get(block=not worked, timeout=IDLE_WAIT_S)
            except queue.Empty:
                worked = core.step()
                self._publish(worked)
                continue
            if command is None:
                return
            self._answer(core, *command)
            self._publish(False)
            worked = True

    def _answer(
        self, core: EngineCore, work: Callable[[EngineCore], Any], future: asyncio.Future[Any]
    ) -> None:
        try:
            result, fault = work(core), None
        except TurnoutError as refused:
            result, fault = None, refused
        self._post(future, result, fault)

    def _post(self, future: asyncio.Future[Any], result: Any, fault: BaseException | None) -> None:
        def settle() -> None:
            if future.done():
                return
            if fault is not None:
                future.set_exception(fault)
            else:
                future.set_result(result)

        self._loop.call_soon_threadsafe(settle)


def _submit(core: EngineCore, requests: Sequence[Request]) -> None:
    """All or none: where one is refused, those before it are taken back."""
    for at, request in enumerate(requests):
        try:
            core.submit(request)
        except TurnoutError:
            for taken in requests[:at]:
                core.abort(taken.rid, "another request of the same call was refused")
            raise
