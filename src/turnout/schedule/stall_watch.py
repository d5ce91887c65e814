"""What a run waits for, told while it goes on: waits.json, the panel's line, one warning for each stall.

    waits.json    {at, pid, host, phase, line, seconds, stalled, chain: [{who, on, what, seconds, limit_s}]}

Owns that file. Promises: it is written anew every TICK_S, and a reader sees all of one picture (turnout doctor); a
root that has not moved for `--stall-warning-s`, over two looks at least, is told once, as an event, in the log and
above the panel; a run that ends at a deadline says the last line that was known (`why`); where the event loop
itself stands still, a thread writes the file, and says in which call. A disk that takes nothing is no fault of this
watch: the line is in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from turnout.core.errors import DeadlineExceeded, RunCut, TurnoutError
from turnout.core.events import RunStalled
from turnout.core.ports import Clock, EventSink
from turnout.core.waits import ENGINES, PLACES, RUN, Chain, Wait, root_cause
from turnout.placement.stacks import LoopWatch, threads_at
from turnout.rollout.pool import RolloutPool
from turnout.schedule.parts import IDLE, TrainerThread
from turnout.schedule.phases import Phases
from turnout.serving.client import EngineClient

TICK_S, STANDS_S = 2.0, 6.0
LOOP = "event loop"
TRAINER_PHASES = ("start", "train", "publish", "checkpoint")
ENGINE_PHASES = ("start", "publish", "prepare", "activate")
log = logging.getLogger(__name__)


@dataclass
class Parties:
    """Who can be waited for, once they are there. `facts` says more of them, by their names in waits."""

    phases: Phases
    engines: Callable[[], Iterable[EngineClient]] = tuple[EngineClient, ...]
    facts: Callable[[], Mapping[str, str]] = dict[str, str]
    trainer: TrainerThread | None = None
    pool: RolloutPool | None = None

    def waits(self) -> list[Wait]:
        """All open waits: what was registered, and what follows from where everybody stands."""
        found = self.phases.waits.open
        registered = list(found)
        for wait in registered:
            if wait.on.startswith("engine "):
                who = "start" if wait.who == ENGINES else PLACES
                found.append(Wait(who, wait.on, wait.what, wait.since, wait.until))
        through = {wait.on: wait.since for wait in registered}
        if self.pool is not None:
            for phase in through.keys() & {"rollout", "drain"}:
                found += self.pool.waits(phase, through[phase])
        for phase in through.keys() & set(TRAINER_PHASES):
            if self.trainer is not None and self.trainer.doing is not None:
                found.append(Wait(phase, "trainer", *self.trainer.doing))
        for phase in through.keys() & set(ENGINE_PHASES):
            for engine in self.engines():
                name = f"engine {engine.engine_id}"
                for path, since in engine.pending.items():
                    if not path.startswith("/health"):  # nobody but the watch on its health waits for that
                        found.append(Wait(phase, name, f"an answer to {path}", since))
        return found


class StallWatch:
    """See the module. `line` is the last that was seen; `stalled` whether its root has stood too long."""

    def __init__(
        self, parties: Parties, path: Path, events: EventSink, clock: Clock, warning_s: float
    ) -> None:
        self._parties, self._path, self._events, self._clock = parties, path, events, clock
        self._warning_s = warning_s
        self._chain = Chain()
        self._told = False
        self.say: Callable[[str], None] = log.warning
        self.line, self.stalled = "", False
        self._known = ""

    async def run(self) -> None:
        """Looks again and again; never ends by itself."""
        beside = LoopWatch(STANDS_S, self._stands_still)
        try:
            while True:
                beside.beat()
                self.look()
                await self._clock.sleep(TICK_S)
        finally:
            beside.stop()

    def _stands_still(self, where: str, seconds: float) -> None:
        """On the thread of the loop's watch."""
        now = self._clock.now()
        chain = Chain((Wait(RUN, LOOP, f"a call to return: {where}", now - seconds),))
        with contextlib.suppress(OSError):
            self._write(chain, chain.line(now), seconds >= self._warning_s)

    def look(self) -> None:
        """One look."""
        chain, now = root_cause(self._parties.waits()), self._clock.now()
        same = chain.key == self._chain.key and chain.since == self._chain.since
        self._chain, self._told = chain, self._told and same
        if chain.waits:  # else a run that ends has given up all it waited for
            self._known = chain.line(now, self._facts(chain))
        self.stalled = same and now - chain.since >= self._warning_s
        self.line = self._known if chain.waits else chain.line(now)
        if self.stalled and not self._told:
            self._told = True
            seconds = round(now - chain.since, 3)
            self._events.emit(RunStalled(self.line, chain.key[-1], seconds))
            self.say(f"nothing has moved for {seconds:.0f} s: {self.line}")
        with contextlib.suppress(OSError):
            self._write(chain, self.line, self.stalled)

    def _facts(self, chain: Chain) -> Mapping[str, str]:
        """More of the root: what is known of an engine; where the thread is that computes."""
        root = chain.key[-1] if chain.waits else ""
        if root == "trainer" and self._parties.trainer is not None:
            return {root: "; ".join(self._parties.trainer.places())}
        if root.startswith("reward"):
            return {root: "; ".join(at for at in threads_at("reward") if IDLE not in at)}
        return self._parties.facts()

    def why(self, fault: TurnoutError) -> str:
        """What more there is to say of the end of a run: what it waited for when that was looked at last."""
        cut = isinstance(fault, DeadlineExceeded | RunCut)
        return self._known if cut or self.stalled else ""

    def _write(self, chain: Chain, line: str, stalled: bool) -> None:
        now = self._clock.now()
        row = {
            "at": self._clock.wall(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "phase": self._parties.phases.current,
            "line": line,
            "seconds": round(now - chain.since, 3) if chain.waits else None,
            "stalled": stalled,
            "chain": chain.to_json(now),
        }
        staged = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        staged.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
        staged.replace(self._path)


@contextlib.asynccontextmanager
async def watched(watch: StallWatch) -> AsyncIterator[None]:
    """The watch goes on beside the block; the error that ends it has what was waited for as a note."""
    task = asyncio.ensure_future(watch.run())
    try:
        yield
    except TurnoutError as fault:
        if why := watch.why(fault):
            fault.add_note(why)
        raise
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
