"""Which engines are behind a router, in the router's own list, and whether it may be asked.

Promises: an engine is behind it only while it holds a committed version that may serve, and counts as behind it
only once the router says that it serves; no request goes through it while it lists anybody else, while weights
are put into place, or while it does not answer. What other runs put into its list stays there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from turnout.core.errors import ConfigError, EngineBusy, EngineDead, Fault, WeightError
from turnout.core.rng import random_id
from turnout.core.types import Finish
from turnout.placement.tasks import first
from turnout.protocol.sglang import GenerateRequest, SamplingParams
from turnout.rollout.sampler import Routes
from turnout.serving.client import EngineClient
from turnout.serving.roster import WorkerType
from turnout.serving.router_client import Behind, Listed, RouterClient, RouterRoute, Worker
from turnout.transfer.fleet import Fleet

PROBE_S = 60.0


class RouterList:
    """See the module. `name` is the router's, which tokens have whose engine nobody names; workers are signed with
    `run`."""

    def __init__(self, name: str, run: str, fleet: Fleet) -> None:
        self._name, self._run, self.fleet = name, run, fleet
        self._client: RouterClient | None = None
        self._down = "it was not started yet"
        self._listed: dict[str, Listed] = {}  # by address, as seen last
        self._asked: set[str] = set()  # added since
        self._route: RouterRoute | None = None
        self._proved = False
        self._aborted_s: float | None = None  # since when it answers with aborts
        self._next = asyncio.Event()

    def begin(self, client: RouterClient) -> None:
        """A router that has started; it has no engines yet."""
        self._client, self._proved, self._down = client, False, "it has no engines yet"
        self._aborted_s = None

    def lose(self, reason: str) -> None:
        """It does not answer."""
        self._down = reason
        self._see({})

    def routes(self, room: Callable[[], float]) -> Routes:
        """How samples find their engines through it."""
        return Routes(self.routable, self.fleet.standing, self.changed, room)

    def routable(self) -> list[RouterRoute]:
        """The router, as it is now; raises WeightError while it must not be asked."""
        route = self._now()
        if not self._proved:
            raise WeightError(f"{self._name} can't be asked: it has yet to pass a token")
        return [route]

    def _now(self) -> RouterRoute:
        if self._client is None or not self._listed:
            raise WeightError(f"{self._name} can't be asked: {self._down}")
        serving = {engine.address.url: engine for engine in self._wanted()}
        if any(self.fleet.changing(engine.engine_id) for engine in serving.values()):
            raise WeightError(f"{self._name} can't be asked: weights are put into place")
        behind = {url for url, one in self._listed.items() if not one.leaves} | self._asked
        if behind - serving.keys():
            wrong = ", ".join(sorted(behind - serving.keys()))
            raise WeightError(
                f"{self._name} can't be asked: behind it is {wrong}, which must not be asked now"
            )
        engines = [serving[url] for url, one in self._listed.items() if one.serves]
        holds = [engine.holds for engine in engines if engine.holds is not None]
        missing = self._missing(engines)
        if missing or not holds:
            raise WeightError(f"{self._name} can't be asked: it says of no {missing} engine that it serves")
        oldest = min(holds, key=lambda held: held.step).version.label
        pairs = any(engine.plan.worker_type is WorkerType.DECODE for engine in engines)
        told = tuple(sorted(serving[url].engine_id for url in behind))
        now = Behind({engine.address.url: engine.engine_id for engine in engines}, oldest, pairs, told)
        if self._route is None or self._route.behind != now or self._route.router is not self._client:
            self._route = RouterRoute(self._client, now, self._run)
        return self._route

    async def changed(self) -> None:
        """As Fleet.changed."""
        await first(self.fleet.changed(), self._next.wait())

    async def match(self) -> bool:
        """One look at the list and what it takes to make it right; whether it is. Raises EngineError, and
        ConfigError for a router that does not pass what samples need."""
        assert self._client is not None, "a router is started before its list is looked at"
        listed = {one.worker.url: one for one in await self._client.workers()}
        wanted = {one.address.url: one for one in self._wanted()}
        self._see(listed)
        for url, one in listed.items():
            if url not in wanted and not one.leaves and one.run == self._run:
                await self._client.remove(one.worker_id)
        for url, engine in wanted.items():
            if url not in listed:
                self._asked.add(url)
                await self._client.add(Worker(url, engine.plan.worker_type, engine.bootstrap_port), self._run)
        right = {url for url, one in listed.items() if one.serves} == set(listed) == set(wanted)
        if right and wanted and not self._proved:
            await self._prove()
        return right

    def _see(self, listed: dict[str, Listed]) -> None:
        before, self._listed = self._listed, listed
        self._asked.clear()
        if listed != before:
            self._tell()

    def _tell(self) -> None:
        change, self._next = self._next, asyncio.Event()
        change.set()

    async def _prove(self) -> None:
        """One token through the router, asked for as samples ask for theirs. An abort may be an engine's that was
        lost just then: asked again, for PROBE_S."""
        try:
            route = self._now()
            params = SamplingParams(max_new_tokens=1, ignore_eos=True)
            request = GenerateRequest(random_id(), (1,), params, extra_key=route.version)
            reply = await route.generate(request, PROBE_S)
        except (WeightError, EngineBusy, EngineDead):
            return  # tried again at the next look
        now = route.clock.now()
        if reply.finish is Finish.ABORT:
            self._aborted_s = now if self._aborted_s is None else self._aborted_s
            if now - self._aborted_s < PROBE_S:
                return
        if len(reply.output_ids) != 1:
            reason = f"it does not pass token ids with their log-probs: {reply.message or reply.text!r}"
            raise ConfigError(
                Fault("--router", self._name, reason, "use another version of it, or --router direct")
            )
        self._proved = True
        self._tell()

    def _wanted(self) -> list[EngineClient]:
        """The engines that belong behind it: of two halves that it pairs as it likes, those of one version."""
        now, holding = self.fleet.current, self.fleet.holding()
        pairs = any(engine.plan.worker_type is WorkerType.DECODE for engine in self.fleet.engines.values())
        return [engine for engine in holding if engine.holds == now] if pairs else holding

    def _missing(self, engines: list[EngineClient]) -> str:
        """A kind of engines that the router needs and has none of; empty where it can serve."""
        kinds = {engine.plan.worker_type for engine in self.fleet.engines.values()}
        return next((kind for kind in kinds if all(e.plan.worker_type is not kind for e in engines)), "")
