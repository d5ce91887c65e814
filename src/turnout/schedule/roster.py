"""The engines of a run as its configuration asks for them. Pure; the one place where this is decided."""

from __future__ import annotations

from turnout.config.run_config import RunConfig
from turnout.placement.layout import Device, Seat, Wanted, place, sizes
from turnout.serving.roster import EnginePlan, Program, WorkerType


def roster(config: RunConfig) -> tuple[EnginePlan, ...]:
    """Every engine that the run starts or connects to, in a fixed order, each with an id of its own. Its devices
    are numbers of this machine."""
    wanted = Wanted(config.actor_gpus, config.groups, config.colocate)
    layout = place(wanted, [Device("localhost", index) for index in range(sizes(wanted).total)])
    return tuple(map(_plan, layout.seats))


def _plan(seat: Seat) -> EnginePlan:
    group = seat.group
    return EnginePlan(
        engine_id=f"{group.label}-{seat.number}",
        model=group.model,
        worker_type=WorkerType(group.worker_type),
        program=Program(group.program),
        model_path=group.model_path,
        updated=group.updated,
        ranks=group.ranks,
        devices=tuple(device.index for device in seat.devices),
        overrides=group.overrides,
    )
