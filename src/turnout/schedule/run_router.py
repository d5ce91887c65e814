"""The request router of a run: started once engines serve, its list kept right, started again, stopped with it.

Promises: a death is told with its cause; the requests that it cost go on from the tokens that they have, and the
next life gets the engines anew; restarts have a budget. A router of somebody else is never started nor stopped,
keeps the living workers that others put there (and is refused with them), and loses those that this run put
there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from turnout.core.errors import ConfigError, DeadlineExceeded, EngineDead, EngineError, Fault, WeightError
from turnout.core.events import RouterLost, RouterReady
from turnout.core.ports import Clock, EventSink
from turnout.placement.tasks import first, together
from turnout.schedule.router_list import RouterList
from turnout.serving.access import OPEN, Access
from turnout.serving.address import Address, parse_address
from turnout.serving.client import EngineClient
from turnout.serving.health_machine import WINDOW_S, Health, Sign
from turnout.serving.router_client import RouterClient, RouterRoute
from turnout.serving.router_launcher import Router, RouterLaunch, check_arguments, launch_router
from turnout.serving.work import Work
from turnout.transfer.fleet import Fleet

POLL_S = 0.05
LOOK_S = 1.0  # between looks at a list that is right
ANSWER_S = 3.0
FAILURES = 3
RESTARTS = 5
SETTLE_S = 30.0  # after which it is told that the list is not what it should be

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RouterPlan:
    """The router of a run, which signs its workers with `run`: one to start, or the address of somebody else's.
    `access`: what its engines ask for."""

    name: str
    run: str
    launch: RouterLaunch | None
    address: Address | None = None
    access: Access = OPEN


class RunRouter:
    """See the module. `check` before anything is started, `start` when there is a fleet, `watch` beside the work,
    `stop` in every case. `members` are the engines behind it."""

    members: RouterList

    def __init__(self, plan: RouterPlan, events: EventSink, clock: Clock) -> None:
        self._plan, self._events, self._clock = plan, events, clock
        self._router: Router | None = None
        self._health = Health()

    async def check(self) -> None:
        """Raises ConfigError for a router that can't be had; takes dead workers out of somebody else's."""
        if self._plan.launch is not None:
            return await check_arguments(self._plan.launch, self._clock)
        client = self._theirs()
        try:
            await self._claim(client)
        except (EngineError, DeadlineExceeded) as fault:
            remedy = "start it first, or leave --sglang-router-ip out"
            raise ConfigError(Fault("--sglang-router-ip", client.address.url, str(fault), remedy)) from fault
        finally:
            await client.close()

    async def start(self, fleet: Fleet) -> None:
        """Starts it, empty; raises EngineError."""
        self.members = RouterList(self._plan.name, self._plan.run, fleet)
        await self._begin()

    def serving(self) -> list[RouterRoute]:
        """The router, or nothing while it must not be asked."""
        with contextlib.suppress(WeightError):
            return self.members.routable()
        return []

    async def watch(self, phase: Callable[[], str], say: Callable[[str], None]) -> None:
        """Keeps the router and its list right until cancelled. Raises EngineDead where it ended too often."""

        def tell(reason: str, then: str) -> None:
            self._events.emit(RouterLost(self._plan.name, reason, then))
            say(f"{self._plan.name}: {reason}; {then}")

        while True:
            reason = await first(self._running.ended(), self._kept())
            self.members.lose(reason)
            if self._plan.launch is None:
                tell(reason, "it is asked again every second")
                await self._answers_again()
                continue
            while reason:
                self._health, pause_s = self._health.after(Sign.ENDED).again(RESTARTS, self._clock.now())
                if pause_s is None:
                    spent = f"{reason}; it was started again {RESTARTS} times in {WINDOW_S:.0f} s"
                    raise EngineDead(self._plan.name, phase(), "none", spent)
                tell(reason, f"it is started again in {pause_s:g} s")
                await self._running.stop()
                await self._clock.sleep(pause_s)
                reason = await self._next_life()

    async def stop(self) -> None:
        """Leaves no process of this run, and no worker of it in the list of somebody else's router."""
        router, self._router = self._router, None
        if router is not None and self._plan.launch is None:
            with contextlib.suppress(EngineError, DeadlineExceeded):  # it is gone: so is its list
                await self._sign_off(router.client)
        if router is not None:
            await router.stop()

    @property
    def _running(self) -> Router:
        assert self._router is not None, "a router is watched after its start"
        return self._router

    async def _begin(self) -> None:
        launch = self._plan.launch
        self._router = (
            Router(self._theirs(), None)
            if launch is None
            else await launch_router(launch, self._clock, self._plan.access)
        )
        self._health = self._health.after(Sign.SERVES)
        self._answered()

    def _answered(self) -> None:
        """It answers, and has no engines of this life yet."""
        router = self._running
        process = router.process
        pid = None if process is None else process.pid
        self._events.emit(RouterReady(self._plan.name, router.client.address.url, pid))
        router.client.work = Work(self._plan.name, self._events, self._clock)
        self.members.begin(router.client)

    async def _next_life(self) -> str:
        """Why it could not be started; empty where it was."""
        try:
            await self._begin()
        except EngineError as fault:
            return fault.reason
        return ""

    async def _kept(self) -> str:
        """Keeps the list right; why the router counts as dead."""
        silent, wrong_since = 0, None
        while True:
            try:
                right, silent = await self._looked(), 0
                wrong_since = self._patient(right, wrong_since)
            except EngineError as fault:
                silent += 1
                if silent == FAILURES:
                    return f"{silent} calls in a row failed, the last with: {fault.reason}"
                await self._clock.sleep(LOOK_S)  # an end of its process is told meanwhile, with its cause

    async def _looked(self) -> bool:
        """Mends the list and waits until the fleet changes, or it is time for another look; whether it was
        right."""
        news = asyncio.ensure_future(self.members.fleet.changed())
        try:
            right = await self.members.match()
            with contextlib.suppress(DeadlineExceeded):
                await self._clock.within(LOOK_S if right else POLL_S, "news of the fleet", news)
            return right
        finally:
            news.cancel()

    def _patient(self, right: bool, since: float | None) -> float | None:
        """Since when the list is not what it should be; told where that lasts."""
        now = self._clock.now()
        if right or since is None:
            return None if right else now
        if now - since < SETTLE_S:
            return since
        log.warning("the list of %s is not what it should be for %g s", self._plan.name, SETTLE_S)
        return now

    async def _answers_again(self) -> None:
        """Returns when somebody else's router answers."""
        while True:
            await self._clock.sleep(LOOK_S)
            with contextlib.suppress(EngineError, DeadlineExceeded):
                await self._running.client.workers()
                return self._answered()

    async def _claim(self, client: RouterClient) -> None:
        """Takes out workers that answer no more, or are of an earlier life of this run; refuses those of others."""
        listed = [one for one in await client.workers() if not one.leaves]
        lives = await together(self._lives(one.worker.url) for one in listed)
        others = [one.worker.url for one, alive in zip(listed, lives) if alive and one.run != self._plan.run]
        if others:
            reason = f"it has workers of somebody else: {', '.join(others)}"
            remedy = "give the run a router of its own, or take them out"
            raise ConfigError(Fault("--sglang-router-ip", client.address.url, reason, remedy))
        for one in listed:
            log.warning("router %s listed %s, which is gone: taken out", client.address.url, one.worker.url)
            await client.remove(one.worker_id)

    async def _lives(self, url: str) -> bool:
        access = Access(tls=self._plan.access.tls)  # keys are not for strangers
        client = EngineClient("worker", parse_address(url, "the list of the router"), self._clock, access)
        try:
            await client.health(ANSWER_S)
        except EngineDead as fault:  # who shows a certificate that is not trusted is there
            return isinstance(fault.__cause__, ssl.SSLError)
        except EngineError as fault:  # a refusal is an answer, silence is none
            return not isinstance(fault.__cause__, DeadlineExceeded)
        finally:
            await client.close()
        return True

    async def _sign_off(self, client: RouterClient) -> None:
        for one in await client.workers():
            if one.run == self._plan.run and not one.leaves:
                await client.remove(one.worker_id)

    def _theirs(self) -> RouterClient:
        assert self._plan.address is not None, "a router is started, or has an address"
        return RouterClient(self._plan.name, self._plan.address, self._clock, self._plan.access)
