"""Engines that only evaluate (--eval-mode dedicated): they follow the versions that are due, and no others.

Owns what these engines serve. Promises: weight updates don't know of them, and never wait for them; one may be
asked only after it attested the very version that is evaluated; an engine that ended is not asked until it is up
again, and then loads what is evaluated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from turnout.core.errors import TurnoutError, WeightError
from turnout.core.ports import Clock
from turnout.core.version import WeightVersion
from turnout.serving.client import EngineClient
from turnout.transfer.transport import Transport


@dataclass(frozen=True)
class Following:
    """How versions come to these engines: by `transport`, each within `deadline_s`. `trust_label`: an engine that
    can only name what it holds is believed. `restarted`: one that ended comes again."""

    transport: Transport
    clock: Clock
    deadline_s: float
    trust_label: bool = False
    restarted: bool = True


class DedicatedEngines:
    """See the module. Loads for one version at a time: who asks for the next one has done with the last."""

    def __init__(self, how: Following) -> None:
        self._how = how
        self._up: dict[str, EngineClient] = {}
        self._serving: list[EngineClient] = []
        self._news = asyncio.Event()

    def joins(self, engine: EngineClient) -> None:
        """The engine is up; what it holds is found out when it is needed."""
        self._up[engine.engine_id] = engine
        self._changes()

    def lost(self, engine_id: str) -> None:
        self._up.pop(engine_id, None)
        self._serving = [engine for engine in self._serving if engine.engine_id != engine_id]
        self._changes()

    async def changed(self) -> None:
        """Waits until another engine may be asked, or one no more. Look first, then wait."""
        await self._news.wait()

    def routable(self) -> Sequence[EngineClient]:
        """The engines that serve the version asked for last; raises WeightError where there is none."""
        if not self._serving:
            raise WeightError("no engine that evaluates serves the version")
        return self._serving

    async def serve(self, version: WeightVersion) -> None:
        """Has every engine that is up load and attest the version. Raises DeadlineExceeded where none is up in
        time, WeightError where none will be, the first fault where none of them could."""
        self._serving = []
        how = self._how
        if not self._up and not how.restarted:
            raise WeightError("no engine that evaluates is left")
        await how.clock.within(how.deadline_s, "an engine that evaluates to be up", self._any_up())
        engines = list(self._up.values())
        results = await asyncio.gather(*(self._loads(e, version) for e in engines), return_exceptions=True)
        faults = [fault for fault in results if isinstance(fault, BaseException)]
        for fault in faults:
            if not isinstance(fault, TurnoutError) or len(faults) == len(engines):
                raise fault
        good = [engine for engine, result in zip(engines, results) if result is None]
        self._serving = [engine for engine in good if self._up.get(engine.engine_id) is engine]
        self._changes()

    async def _loads(self, engine: EngineClient, version: WeightVersion) -> None:
        how, end = self._how, self._how.clock.now() + self._how.deadline_s
        held = await engine.attest(how.deadline_s)
        if held.root != version.root and held.label != version.label:
            left = max(0.001, end - how.clock.now())
            found = await how.transport.catch_up(version, engine, left)
            held = held if found is None else found
        proved = held.root == version.root or (how.trust_label and held.label == version.label)
        if not proved:
            raise WeightError(
                f"engine {engine.engine_id} holds {held.root or held.label}, not {version.label}"
            )
        if held.label != version.label:  # the checkpoint that it was started with
            await engine.set_version_label(version.label)
        engine.version = version.label

    async def _any_up(self) -> None:
        while not self._up:
            await self._news.wait()

    def _changes(self) -> None:
        before, self._news = self._news, asyncio.Event()
        before.set()
