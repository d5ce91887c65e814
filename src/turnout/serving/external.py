"""Connects to engines that somebody else runs. Starts none, stops none.

Promises: an engine is connected to only once it answers, generates where it is an SGLang, and is what the run needs
(turnout.serving.discovery); one process is one engine, whatever names its host has; an embedded engine works for
one run at a time, by a lease that probes renew; that another process answers at the address is told as soon as a
probe sees it, and all that is asked at a start is asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

from turnout.core.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineBusy,
    EngineError,
    EngineRefused,
    EngineReplaced,
    Fault,
)
from turnout.core.ports import Clock
from turnout.serving.access import Access
from turnout.serving.address import Address, parse_address
from turnout.serving.client import EngineClient
from turnout.serving.discovery import FLAG, EngineInfo, ModelIdentity, NotUnderstood, ask, identity_of
from turnout.serving.launcher import Engine
from turnout.serving.roster import EnginePlan, Program
from turnout.serving.sglang_client import SglangClient
from turnout.weights.stock_checksums import stock_of

POLL_S, LEASE_POLL_S = 0.25, 1.0
LEAVE_S = 2.0
ASK_S = 10.0
GENERATES_S = 25.0  # /health_generate itself waits 20 s for a token
log = logging.getLogger(__name__)


def external_plan(address: Address) -> EnginePlan:
    """Its place is its name; the rest is known once it has answered."""
    return EnginePlan(address.place, program=Program.EXTERNAL, address=address.url)


def plans_of(lines: Iterable[str], where: str) -> tuple[EnginePlan, ...]:
    """One address a line; empty ones and what follows a # don't count. Raises ConfigError with all faults; the same
    address twice is one engine."""
    faults: list[Fault] = []
    plans: dict[str, EnginePlan] = {}
    for line in lines:
        text = line.partition("#")[0].strip()
        try:
            plan = external_plan(parse_address(text, where)) if text else None
        except ConfigError as wrong:
            faults += wrong.faults
            continue
        if plan is not None:
            plans.setdefault(plan.engine_id, plan)
    if faults:
        raise ConfigError(faults)
    return tuple(plans.values())


class Elsewhere:
    """The process of somebody else's engine, as far as a run may know it: it never ends and is never stopped."""

    pid: int | None = None
    alive = True
    state = ""

    async def ended(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    def kill(self) -> None:
        """It is not ours to end."""

    async def stop(self, grace_s: float) -> None:
        """Leaves it alone."""


@dataclass(frozen=True)
class Tenure:
    """For which run engines work: its id and incarnation. A lease is for `first_s` seconds at first, and for
    `renewed_s` after each probe."""

    run: str
    incarnation: int
    first_s: float
    renewed_s: float

    async def lease(self, client: EngineClient, seconds: float, deadline_s: float) -> tuple[str, int]:
        """Takes the lease of an embedded engine, or renews it; the identity of its process, empty where it knows no
        leases, and the term (turnout.engine.lease). Raises EngineBusy while another run has it."""
        body = {"run": self.run, "incarnation": self.incarnation, "seconds": seconds}
        try:
            row = await client.control("/lease", body, deadline_s)
        except EngineRefused as fault:
            log.warning("%s: another run may ask it as well", fault)
            return "", 0
        return (identity_of(row, ours=True), row.get("term", 0)) if isinstance(row, dict) else ("", 0)


class ExternalEngine(Engine):
    """An engine that is asked by this run until `stop`, which only ends that. `found`: what each engine is, by its
    id; `term`: of the lease that the run has."""

    def __init__(
        self, client: EngineClient, found: dict[str, EngineInfo], tenure: Tenure, term: int = 0
    ) -> None:
        super().__init__(Elsewhere(), client)
        self._found, self._tenure, self._term = found, tenure, term
        self._info = found[client.engine_id]
        self._silent = False

    async def probe(self, timeout_s: float) -> None:
        """An SGLang takes long to start: that another process answers is asked of it only after a silence."""
        silent, self._silent = self._silent, True
        await super().probe(timeout_s)
        if self._info.ours or silent:
            identity = await self._identity(timeout_s)
            if identity and self._info.identity not in ("", identity):
                raise self._gone("another process answers at its address")
        self._silent = False

    async def keep(self, timeout_s: float) -> None:
        """Renews the lease: a long update must not outlast it."""
        if self._info.ours:
            try:
                await self._identity(timeout_s)
            except EngineReplaced:
                raise
            except (EngineError, DeadlineExceeded) as fault:
                log.info("its lease is not renewed now: %s", fault)

    async def _identity(self, timeout_s: float) -> str:
        try:
            if self._info.ours:
                identity, term = await self._tenure.lease(self.client, self._tenure.renewed_s, timeout_s)
                if identity in ("", self._info.identity) and term != self._term:
                    raise self._gone(
                        "another run had it after the lease ran out, and its weights may be others"
                    )
                return identity
            return (await ask(self.client, timeout_s)).identity
        except (EngineBusy, NotUnderstood) as fault:
            raise self._gone(fault.reason if isinstance(fault, EngineBusy) else str(fault)) from fault

    def _gone(self, reason: str) -> EngineError:
        return self.client.fault(EngineReplaced, "health", reason)

    async def stop(self) -> None:
        if self._info.ours and self._found.pop(self.engine_id, None) is not None:
            with contextlib.suppress(EngineError, DeadlineExceeded):  # it runs out by itself
                await self._tenure.lease(self.client, 0.0, LEAVE_S)
        self._found.pop(self.engine_id, None)
        await super().stop()


@dataclass(frozen=True)
class Wanted:
    """What every engine must be, and how it is asked. `stock`: what the run asks that no SGLang does."""

    dtype: str
    model: ModelIdentity
    access: Access
    stock: tuple[Fault, ...] = ()


class ExternalEngines:
    """See the module. `found` is what each engine, by its id, said of itself when it was connected to last."""

    def __init__(self, wanted: Wanted, clock: Clock, tenure: Tenure) -> None:
        self._wanted, self._clock, self._tenure = wanted, clock, tenure
        self.found: dict[str, EngineInfo] = {}

    async def connect(self, plan: EnginePlan, deadline_s: float) -> Engine:
        """The engine of this plan. Raises EngineError where it does not answer in time, ConfigError where what
        answers is not what the run needs."""
        assert plan.address is not None, "an external engine has an address"
        address, name = parse_address(plan.address, FLAG), plan.engine_id
        end = self._clock.now() + deadline_s
        self.found.pop(name, None)
        info = await self._answers(name, address, end)
        wanted = self._wanted
        faults = [*info.faults(wanted.dtype, wanted.model, wanted.stock), *self._twins(info)]
        if faults:
            raise ConfigError(faults)
        self.found[name] = info  # from here on no other name may have it
        kind = EngineClient if info.ours else SglangClient
        client = kind(name, address, self._clock, self._wanted.access)
        path = info.model_path or None
        client.plan = replace(plan, worker_type=info.worker_type, ranks=info.ranks, model_path=path)
        term = 0
        try:
            if isinstance(client, SglangClient):
                client.stock = stock_of(info.dtype, info.device)
                await client.control("/continue_generation", {}, ASK_S)  # a run that died may have paused it
                await client.generates(min(GENERATES_S, max(1.0, end - self._clock.now())))
            else:
                term = await self._leased(client, end)
        except BaseException:
            self.found.pop(name, None)
            await client.close()
            raise
        return ExternalEngine(client, self.found, self._tenure, term)

    async def _leased(self, client: EngineClient, end: float) -> int:
        """Has the engine work for this run; the term. Waits for one that another run has: it may have died, and its
        lease runs out."""
        told = False
        while True:
            try:
                return (await self._tenure.lease(client, self._tenure.first_s, ASK_S))[1]
            except EngineBusy as fault:
                if self._clock.now() + LEASE_POLL_S >= end:
                    remedy = "end the other run, or give another engine"
                    raise ConfigError(Fault(FLAG, client.address.place, fault.reason, remedy)) from fault
                if not told:
                    log.warning("%s; it is waited for", fault)
                told = True
            await self._clock.sleep(LEASE_POLL_S)

    async def _answers(self, name: str, address: Address, end: float) -> EngineInfo:
        """Asks until it answers."""
        began, client = self._clock.now(), EngineClient(name, address, self._clock, self._wanted.access)
        try:
            while True:
                left = end - self._clock.now()
                try:
                    return await ask(client, max(0.1, min(ASK_S, left)))
                except NotUnderstood as wrong:
                    raise ConfigError(Fault(FLAG, address.place, str(wrong), "give an engine")) from wrong
                except EngineRefused as fault:
                    remedy = "give its key by --rollout-engine-api-key-env, or the address of an engine"
                    raise ConfigError(Fault(FLAG, address.place, fault.reason, remedy)) from fault
                except EngineError as fault:
                    if self._clock.now() + POLL_S >= end:
                        what = f"did not answer at {address.url} within {end - began:.3g} s: {fault}"
                        raise EngineError(name, "start", "none", what) from fault
                await self._clock.sleep(POLL_S)
        finally:
            await client.close()

    def _twins(self, info: EngineInfo) -> list[Fault]:
        same = [
            name for name, other in self.found.items() if info.identity and other.identity == info.identity
        ]
        where, remedy = info.address.place, "name each engine once"
        return [Fault(FLAG, where, f"is the engine {name} by another name", remedy) for name in same]
