"""The compute thread: the one owner of EngineCore. Commands come in through a bounded queue and act between
steps; results go back to the event loop by call_soon_threadsafe, which is never blocked.

Promises: a command that was accepted is answered, or the process ends: a crash of this thread is logged in
one line and ends the process with status 70, since an engine that cannot compute must not look alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from turnout.core.errors import EngineBusy, Fault, TurnoutError, UserError
from turnout.engine.core import Attested, EngineCore, Load
from turnout.engine.model import LoadedModel, load_model
from turnout.engine.scheduler_machine import Request
from turnout.engine.settings import EngineSettings

log = logging.getLogger(__name__)
T = TypeVar("T")
QUEUE_LIMIT = 16384
IDLE_WAIT_S = 1.0
START_DEADLINE_S = 600.0
CRASH_STATUS = 70


class ComputeThread:
    """See the module. All public methods are called on the event loop that made it."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.beat = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._commands: queue.Queue[tuple[Callable[[EngineCore], Any], asyncio.Future[Any]] | None]
        self._commands = queue.Queue(QUEUE_LIMIT)
        self._finished: dict[str, asyncio.Future[Request]] = {}
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

    async def generate(self, request: Request, deadline_s: float) -> Request:
        """The request, ended. At the deadline it is aborted and returned with what exists; a cancelled caller
        (its client went away) aborts it too, so that its pages return."""
        if request.rid in self._finished:
            raise UserError(Fault("rid", request.rid, "is in use by a request that still runs"))
        ended: asyncio.Future[Request] = self._loop.create_future()
        self._finished[request.rid] = ended
        try:
            await self.do(lambda core: core.submit(request), deadline_s)
            done, _ = await asyncio.wait([ended], timeout=deadline_s)
            if not done:
                await self.do(lambda c: c.abort(request.rid, f"deadline of {deadline_s:g} s"), deadline_s)
            return await ended
        except asyncio.CancelledError:
            self._abandon(request.rid)
            raise
        finally:
            if self._finished.get(request.rid) is ended:
                del self._finished[request.rid]

    def _abandon(self, rid: str) -> None:
        try:
            self._commands.put_nowait(
                (lambda core: core.abort(rid, "the client went away"), self._loop.create_future())
            )
        except queue.Full:
            log.warning("request %s was abandoned and runs to its end: %d commands wait", rid, QUEUE_LIMIT)

    def _ended(self, request: Request) -> None:
        self._loop.call_soon_threadsafe(self._deliver, request)

    def _deliver(self, request: Request) -> None:
        future = self._finished.get(request.rid)
        if future is not None and not future.done():
            future.set_result(request)

    def _main(self) -> None:
        try:
            torch.set_num_threads(self.settings.threads)
            try:
                core = EngineCore(load_model(self.settings), self.settings, self._ended)
            except (TurnoutError, OSError) as fault:
                self._post(self._started, None, fault)
                return
            self._post(self._started, core, None)
            self._run(core)
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
                continue
            if command is None:
                return
            self._answer(core, *command)
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
