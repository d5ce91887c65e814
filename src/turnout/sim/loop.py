"""An asyncio event loop whose time passes only by its timers: what would take hours takes as long as its callbacks.

Owns the queue of callbacks and the heap of timers. Promises: nothing here reads a real clock, starts a thread or
opens a socket, so that one seed gives one run; callbacks that are ready run in the order in which they were
registered, as asyncio promises, timers of one instant in an order drawn from the seed; a callback of a Life that
has been killed never runs, not even a `finally` of it, as of a process that got SIGKILL; a wait that nothing can
end is Stuck at once, and so is one past the limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

from turnout.core.errors import TurnoutError
from turnout.placement.real import RealClock

EPOCH_S = 1_700_000_000.0  # what the wall clock shows at virtual time 0
TASKS_KEPT = 200  # that are done, at least
TIE_S = 1e-9  # timers of one instant are spread over so much
LIFE: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)


class Stuck(Exception):
    """Everything waits and no timer is set, or the world went on past its limit."""


class Killed(BaseException):
    """Unwinds a process of the virtual world that was killed within a call."""


class CallbackRaised(Exception):
    """A callback raised: asyncio would write it to a log and go on, with whatever waits for it waiting for ever."""


class Life:
    """One process of the virtual world: what runs in a context that holds it dies with it. `crash_at` is the number
    of the callback before which it is killed, so that a kill can come at every await (None: not by a count)."""

    def __init__(self, name: str, crash_at: int | None = None) -> None:
        self.name, self.crash_at = name, crash_at
        self.alive = True
        self.callbacks = 0
        self.on_kill: Callable[[], None] = lambda: None

    def kill(self) -> None:
        """From here on nothing of it runs."""
        if self.alive:
            self.alive = False
            self.on_kill()

    def counts_out(self) -> bool:
        """Counts one callback; whether the life ended before it."""
        self.callbacks += 1
        if self.callbacks == self.crash_at:
            self.kill()
        return not self.alive


class _Callback:
    """What asyncio calls a handle. `call` None: cancelled."""

    __slots__ = ("args", "call", "context", "life", "when_s")

    def __init__(
        self, call: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context | None
    ) -> None:
        self.call: Callable[..., object] | None = call
        self.args = args
        self.context = context = contextvars.copy_context() if context is None else context
        self.life: Life | None = context.get(LIFE)
        self.when_s = 0.0

    def cancel(self) -> None:
        self.call, self.args = None, ()

    def cancelled(self) -> bool:
        return self.call is None

    def when(self) -> float:
        return self.when_s

    @property
    def void(self) -> bool:
        """Whether it never runs: cancelled, or of a life that is over."""
        return self.call is None or (self.life is not None and not self.life.alive)


UNSEEN = (RuntimeError, OSError, TurnoutError, Killed)  # what may be raised when a world is over


class VirtualLoop(asyncio.AbstractEventLoop):
    """See the module. `faults` holds what tasks raised that nobody looked at."""

    def __init__(self, seed: int, callbacks_max: int = 3_000_000, seconds_max: float = 1e6) -> None:
        self.at = 0.0
        self.faults: list[BaseException] = []
        self._random = random.Random(seed).random
        self._ready: deque[_Callback] = deque()
        self._timers: list[tuple[float, int, _Callback]] = []
        self._made = 0
        self._left, self._seconds_max = callbacks_max, seconds_max
        self._running = False
        self._tasks: dict[Any, Life | None] = {}
        self._forget_at = TASKS_KEPT

    # time and callbacks

    def time(self) -> float:
        return self.at

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> _Callback:
        handle = _Callback(callback, args, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there is one thread

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> _Callback:
        return self._at(self.at + delay, _Callback(callback, args, context))

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> _Callback:
        return self._at(when, _Callback(callback, args, context))

    def _at(self, when: float, handle: _Callback) -> _Callback:
        when = max(when, self.at) + self._random() * TIE_S
        handle.when_s = when
        self._made += 1
        heapq.heappush(self._timers, (when, self._made, handle))
        return handle

    # running

    def run_until_complete(self, future: Any) -> Any:
        """The result of a future or coroutine; raises Stuck where it can never come, or not within the limits."""
        task = asyncio.ensure_future(future, loop=self)
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        self._running = True
        try:
            while not task.done():
                self._turn()
            return task.result()
        finally:
            self._running = False
            asyncio._set_running_loop(before)

    def _turn(self) -> None:
        """Runs what is ready, or moves to the next timer."""
        ready = self._ready
        if not ready:
            self._move()
        for _ in range(len(ready)):
            handle = ready.popleft()
            call, life = handle.call, handle.life
            if call is None or (life is not None and (not life.alive or life.counts_out())):
                continue
            self._left -= 1
            if self._left < 0:
                raise Stuck("the world made more callbacks than it may: something never ends")
            try:
                handle.context.run(call, *handle.args)
            except Killed:
                if life is None or life.alive:
                    raise
            except Exception as fault:
                raise CallbackRaised(f"{type(fault).__name__}: {fault}") from fault

    def _move(self) -> None:
        timers = self._timers
        while timers and timers[0][2].void:
            heapq.heappop(timers)
        if not timers:
            raise Stuck("everything waits and no timer is set")
        self.at = at = timers[0][0]
        if at > self._seconds_max:
            raise Stuck(f"the world went on past {self._seconds_max:.0f} virtual seconds")
        while timers and timers[0][0] <= at:
            self._ready.append(heapq.heappop(timers)[2])

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return False

    def get_debug(self) -> bool:
        return False

    # futures and tasks

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> asyncio.Task[Any]:  # type: ignore[override]
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        if len(self._tasks) >= self._forget_at:
            self._forget()
        self._tasks[task] = LIFE.get() if context is None else context.get(LIFE)
        return task

    def _forget(self) -> None:
        """Lets go of tasks that are done and left nothing unseen."""
        self._tasks = {k: life for k, life in self._tasks.items() if not k.done() or k._log_traceback}
        self._forget_at = 2 * len(self._tasks) + TASKS_KEPT

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        """What a thread would do, done here between two callbacks."""
        del executor

        async def work() -> Any:
            return func(*args)

        return self.create_task(work())

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.faults.append(context.get("exception") or RuntimeError(context["message"]))

    def discard(self) -> None:
        """Ends everything that still waits, and keeps what live processes left unseen; what a killed one left is no
        fault. `finally` blocks run now, in a world that is over: nothing that they begin goes on."""
        for task, life in self._tasks.items():
            if task.done() and task._log_traceback:
                task._log_traceback = False
                if life is None or life.alive:
                    self.faults.append(task.exception())
        before, told = asyncio._get_running_loop(), sys.unraisablehook
        asyncio._set_running_loop(self)
        sys.unraisablehook = lambda _: None  # of generators that end with their tasks
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what was about to be awaited begins no more
            while self._tasks:
                task, _ = self._tasks.popitem()
                if not task.done():
                    task._log_destroy_pending = False
                    with contextlib.suppress(*UNSEEN):
                        task.get_coro().close()
        sys.unraisablehook = told
        asyncio._set_running_loop(before)
        self._ready.clear()
        self._timers.clear()


class VirtualClock(RealClock):
    """The Clock port on a VirtualLoop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return self._loop.at

    def wall(self) -> float:
        return EPOCH_S + self._loop.at

    async def sleep(self, seconds: float) -> None:
        """As asyncio.sleep."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.Future(loop=self._loop)
        timer = self._loop.call_later(seconds, _wake, future)
        try:
            await future
        finally:
            timer.cancel()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.set_result(None)
