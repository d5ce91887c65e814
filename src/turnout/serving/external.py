"""Connects to engines that somebody else runs. Starts none, stops none.

Promises: an engine is connected to only once it answers, generates where it is an SGLang, and is what the run needs
(turnout.serving.discovery); one process is one engine, whatever names its host has; what it is asked at its start
may be asked again, when the same or another process answers at its address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace

from turnout.core.errors import (
    ConfigError,
    EngineError,
    EngineRefused,
    Fault,
)
from turnout.core.ports import Clock
from turnout.serving.access import Access
from turnout.serving.address import Address, parse_address
from turnout.serving.client import EngineClient
from turnout.serving.discovery import FLAG, EngineInfo, ModelIdentity, NotUnderstood, ask
from turnout.serving.launcher import Engine
from turnout.serving.roster import EnginePlan, Program
from turnout.serving.sglang_client import SglangClient
from turnout.serving.weights_client import EngineWeights
from turnout.weights.stock_checksums import stock_of

POLL_S = 0.25
ASK_S = 10.0
GENERATES_S = 25.0  # /health_generate itself waits 20 s for a token


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

    async def stop(self, grace_s: float) -> None:
        """Leaves it alone."""


class ExternalEngine(Engine):
    """An engine that is asked by this run until `stop`, which only ends that. `found`: where it is known."""

    def __init__(self, client: EngineClient, found: dict[str, EngineInfo]) -> None:
        super().__init__(Elsewhere(), client)
        self._found = found

    async def stop(self) -> None:
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

    def __init__(self, wanted: Wanted, clock: Clock) -> None:
        self._wanted, self._clock = wanted, clock
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
        try:
            if isinstance(client, SglangClient):
                client.stock = stock_of(info.dtype, info.device)
                await client.control("/continue_generation", {}, ASK_S)  # a run that died may have paused it
                await client.generates(min(GENERATES_S, max(1.0, end - self._clock.now())))
            else:  # it may have begun an update, and ours refuses another beside it
                await EngineWeights(client).drop(ASK_S)
        except BaseException:
            self.found.pop(name, None)
            await client.close()
            raise
        return ExternalEngine(client, self.found)

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
