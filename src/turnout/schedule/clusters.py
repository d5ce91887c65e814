"""From the configuration to where the run's processes lie, and who may control them. Pure but for the secret."""

from __future__ import annotations

import secrets
from pathlib import Path

from turnout.config.run_config import RunConfig
from turnout.core.ports import Clock
from turnout.placement.cluster import Cluster, Place, ThisMachine
from turnout.placement.ray_cluster import RayCluster, RayPlan
from turnout.schedule.roster import roster
from turnout.schedule.wiring import admin_token, cpu_count
from turnout.serving.roster import EnginePlan, Program


def cluster_of(config: RunConfig, run_id: str, logs: Path, clock: Clock) -> Cluster:
    """`logs` takes the log of a Ray that the run starts itself."""
    if config.cluster == "local":
        return ThisMachine(clock)
    places = () if config.external else tuple(place_of(config, plan) for plan in roster(config))
    trainer = (config.actor_num_nodes, config.actor_num_gpus_per_node) if config.ranks_in_cluster else (0, 0)
    cpus = max(cpu_count(), sum(place.devices for place in places) + trainer[0] * trainer[1])
    deadline_s = config.engine_start_timeout_s
    return RayCluster(RayPlan(config.ray_address, run_id, places, deadline_s, logs, cpus, trainer), clock)


def place_of(config: RunConfig, plan: EnginePlan) -> Place:
    gpus = plan.program is Program.SGLANG and config.sglang_device == "cuda"
    return Place(plan.engine_id, plan.ranks, gpus)


def token_of(config: RunConfig) -> str | None:
    """What control calls to the run's own engines carry: beyond loopback they must carry something, which is made
    where nobody gave it. Raises ConfigError."""
    given = admin_token(config)
    return secrets.token_urlsafe(32) if given is None and config.cluster == "ray" else given
