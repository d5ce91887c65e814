"""The engines of a run as its configuration asks for them. Pure; the one place where this is decided."""

from __future__ import annotations

from math import inf

from turnout.config.check_external import ADDRESSES
from turnout.config.run_config import RunConfig
from turnout.config.server_groups import Group
from turnout.core.errors import ConfigError, Fault
from turnout.placement.layout import Device, Seat, Wanted, place, sizes
from turnout.serving.external import plans_of
from turnout.serving.roster import ACTOR, EnginePlan, Program, WorkerType


def roster(config: RunConfig) -> tuple[EnginePlan, ...]:
    """Every engine that the run starts or connects to, in a fixed order, each with an id of its own. Its devices
    are numbers of this machine."""
    if config.external:
        return plans_of(config.rollout_external_engine_addrs, ADDRESSES)
    only = "rollout" if config.debug_rollout_only else ""
    wanted = Wanted(config.actor_gpus, config.groups, config.colocate, only=only)
    layout = place(wanted, [Device("localhost", index) for index in range(sizes(wanted).total)])
    return tuple(_plan(config, seat) for seat in layout.seats)


def actor_model(config: RunConfig) -> str:
    """The name of the model that is trained."""
    return next((plan.model for plan in roster(config) if plan.updated), ACTOR)


def check_gpus(config: RunConfig, available: int | None) -> None:
    """Raises ConfigError for the first SGLang that would lie on a GPU that is not among the `available` ones of
    this machine (None: not known)."""
    if available is None or config.sglang_device != "cuda":
        return
    for plan in roster(config):
        if plan.program is Program.SGLANG and plan.devices[-1] >= available:
            reason = (
                f"engine {plan.engine_id} would lie on GPU {plan.devices[-1]} of {available}, counted from 0"
            )
            remedy = "give fewer engines"
            if not config.colocate:
                reason += f", since the trainer has the first {config.actor_gpus}"
                remedy += ", or --colocate to share them"
            raise ConfigError(Fault("--rollout-num-gpus", str(config.rollout_gpus), reason, remedy))


def _plan(config: RunConfig, seat: Seat) -> EnginePlan:
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
        running=_running(config, group),
    )


def _running(config: RunConfig, group: Group) -> float:
    """Requests that an engine of the group runs at once; SGLang on a GPU sizes itself, unless it is told."""
    sglang = group.program == "sglang"
    options = (*config.sglang_args.items(), *group.overrides.items()) if sglang else group.overrides.items()
    given = {name.replace("_", "-"): value for name, value in options}
    sizes_itself = sglang and config.sglang_device == "cuda"
    return float(
        given.get("max-running-requests", inf if sizes_itself else config.engine_max_running_requests)
    )
