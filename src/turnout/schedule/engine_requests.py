"""The run's end of `turnout engines` (turnout.protocol.engine_requests), and its look at the file of addresses.

Promises: a request is taken before anything is done, and answered once it was done or refused; what an earlier life
of the run left in the folder is answered by nobody, and removed; one that can't be taken is told once, and keeps
nobody else waiting; a file of addresses counts once it reads the same twice, so that one that is being written
takes no engine out, and a fault in it is told once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from turnout.core.errors import ConfigError, TurnoutError
from turnout.core.ports import Clock, Store
from turnout.protocol.engine_requests import ANSWERED, ASKED, FOLDER, EngineAnswer, EngineRequest
from turnout.schedule.engine_changes import EngineChanges, Refused
from turnout.schedule.external import FILE, listed
from turnout.serving.roster import EnginePlan

log = logging.getLogger(__name__)
POLL_S = 0.3
FILE_POLL_S = 1.0
AT_ONCE_MAX = 8


class EngineRequests:
    """Answers requests until it is cancelled."""

    def __init__(self, changes: EngineChanges, run_dir: Path, clock: Clock, files: Store) -> None:
        self._changes, self._folder = changes, run_dir / FOLDER
        self._clock, self._files = clock, files
        self._tasks: set[asyncio.Task[None]] = set()
        self._told: set[str] = set()

    async def run(self) -> None:
        if self._files.names(self._folder):
            self._files.remove_tree(self._folder)
        self._folder.mkdir(exist_ok=True)
        try:
            while True:
                self._tasks = {task for task in self._tasks if not task.done()}
                for name in self._asked():
                    if len(self._tasks) < AT_ONCE_MAX and (data := self._taken(name)) is not None:
                        asked = name.removesuffix(ASKED)
                        self._tasks.add(asyncio.ensure_future(self._answer(asked, data)))
                await self._clock.sleep(POLL_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _asked(self) -> list[str]:
        try:
            return [name for name in self._files.names(self._folder) if name.endswith(ASKED)]
        except OSError as fault:
            self._tell(f"requests about engines can't be listed: {fault}")
            return []

    def _taken(self, name: str) -> bytes | None:
        """A request, which is in the folder no more; None: it was taken back, or can't be taken now."""
        try:
            data = self._files.read(self._folder / name)
            self._files.remove_tree(self._folder / name)
        except FileNotFoundError:
            return None
        except OSError as fault:
            self._tell(f"a request about engines can't be taken: {fault}")
            return None
        return data

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            log.warning("%s", text)

    async def _answer(self, asked: str, data: bytes) -> None:
        try:
            answer = EngineAnswer(True, await self._done(EngineRequest.decode(data)), self._rows())
        except (TurnoutError, OSError, ValueError, TypeError) as fault:
            answer = EngineAnswer(False, str(fault), self._rows())
        try:
            self._files.publish_file(self._folder / f"{asked}{ANSWERED}", answer.encode())
        except OSError as fault:
            log.warning("a request about engines was done, and not answered: %s", fault)

    async def _done(self, request: EngineRequest) -> str:
        if request.verb == "ls":
            return ""
        if request.verb == "add" and request.engines:
            return await self._changes.add_addresses(request.engines)
        if request.verb == "add":
            return await self._changes.add_own(request.count)
        if listed := self._changes.listed.intersection(request.engines):
            names = ", ".join(sorted(listed))
            raise Refused(f"{FILE} names {names}: take it out there, else it would come back")
        return "; ".join([await self._changes.remove(name, "asked to leave") for name in request.engines])

    def _rows(self) -> tuple[dict[str, Any], ...]:
        engines = self._changes.engines
        rows: list[dict[str, Any]] = []
        for view in engines.views():
            client = engines.client(view.engine_id)
            plan = engines.plans[view.engine_id] if client is None else client.plan
            rows.append(
                {
                    "engine": view.engine_id,
                    "state": view.state,
                    "version": view.version,
                    "url": plan.address if client is None else client.address.url,
                    "program": plan.program.value,
                    "worker_type": plan.worker_type.value,
                    "ranks": plan.ranks,
                    "model": plan.model,
                }
            )
        return tuple(rows)


class AddressFile:
    """Follows --rollout-external-engine-file until it is cancelled. `say` gets one line for each new fault."""

    def __init__(
        self, changes: EngineChanges, file: Path, kept: set[str], clock: Clock, say: Callable[[str], None]
    ) -> None:
        """`kept`: ids that the file does not decide about."""
        self._changes, self._file, self._kept, self._clock, self._say = changes, file, kept, clock, say
        self._named = {name for name in changes.engines.plans if name not in kept}
        changes.listed = frozenset(self._named)
        self._told: set[str] = set()

    async def run(self) -> None:
        before: tuple[EnginePlan, ...] | None = None
        while True:
            await self._clock.sleep(FILE_POLL_S)
            try:
                plans = listed(self._file)
            except ConfigError as fault:
                self._tell(str(fault))
                continue
            if plans == before:
                await self._follow(plans)
            before = plans

    async def _follow(self, plans: tuple[EnginePlan, ...]) -> None:
        wanted = {plan.engine_id: plan for plan in plans if plan.engine_id not in self._kept}
        for name in wanted.keys() - self._changes.engines.plans.keys():
            self._say(f"{FILE} names {name}: it joins once it answers")
            self._changes.engines.expect(wanted[name])
        gone = (self._named - wanted.keys()) & self._changes.engines.plans.keys()
        self._named, self._changes.listed = set(wanted), frozenset(wanted)
        for name in gone:
            try:
                self._say(await self._changes.remove(name, f"{FILE} names it no more"))
            except Refused as fault:
                self._named.add(name)
                self._tell(str(fault))

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._say(text)


@asynccontextmanager
async def beside(
    work: Mapping[str, Coroutine[Any, Any, None]], say: Callable[[str], None]
) -> AsyncIterator[None]:
    """Does this work, by what it heeds, while the block runs. A fault of one ends that one alone, and is told when
    it happens."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (fault := task.exception()) is not None:
            say(f"{task.get_name()} is heeded no more: {fault!r}")

    tasks = [asyncio.create_task(one, name=name) for name, one in work.items()]
    for task in tasks:
        task.add_done_callback(ended)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
