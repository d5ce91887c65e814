"""Whether the router can be had: a program that is installed, or one of somebody else. Nothing is started."""

from __future__ import annotations

from turnout.core.errors import ConfigError, DeadlineExceeded, EngineError
from turnout.core.ports import Clock
from turnout.serving.access import OPEN, Access
from turnout.serving.address import Address
from turnout.serving.checklist.lines import Finding, failed, proved, unknown
from turnout.serving.router_client import RouterClient
from turnout.serving.router_launcher import RouterLaunch, check_arguments


async def own_router(launch: RouterLaunch, clock: Clock) -> tuple[Finding, ...]:
    """Of a router that the run starts: its arguments and policy, against its own list."""
    try:
        await check_arguments(launch, clock)
    except ConfigError as fault:
        return tuple(failed(f.reason, f"{f.where} {f.value}") for f in fault.faults)
    except DeadlineExceeded as fault:
        return (unknown(str(fault), launch.kind),)
    return (proved(f"is installed, and knows its policy and {len(launch.arguments)} arguments", launch.kind),)


async def their_router(
    address: Address, clock: Clock, deadline_s: float, access: Access = OPEN
) -> tuple[Finding, ...]:
    """Of a router that somebody else runs: it lists its workers, none of which may be another's."""
    client = RouterClient("router", address, clock, access)
    try:
        listed = await clock.within(deadline_s, "the router to list its workers", client.workers())
    except (EngineError, DeadlineExceeded) as fault:
        return (failed(fault.reason if isinstance(fault, EngineError) else str(fault), address.place),)
    finally:
        await client.close()
    there = [each.worker.url for each in listed if not each.leaves]
    if there:
        return (unknown(f"it has workers already: {', '.join(there)}", address.place),)
    return (proved("lists its workers, of which it has none", address.place),)
