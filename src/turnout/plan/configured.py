"""The run as it is configured, in the model's terms: its own layout, schedule and way of versions."""

from __future__ import annotations

from turnout.config.run_config import RunConfig
from turnout.plan.cluster import Cluster, Found
from turnout.plan.layouts import Layout, Work
from turnout.plan.rates import Measured
from turnout.plan.search import parts_of
from turnout.plan.timing import Parts, Prediction
from turnout.plan.virtual import simulate


def own_layout(config: RunConfig, cluster: Cluster) -> Layout | None:
    """None where engines are somebody else's, of several kinds, or none."""
    if config.external or config.sglang_config is not None or not config.groups:
        return None
    engines, ranks = config.updated_engines, config.rollout_num_gpus_per_engine
    if cluster.cores:
        tp, train = config.engine_thread_count(cluster.devices), config.trainer_thread_count(cluster.devices)
        kind = "time-sliced" if config.offload else "disaggregated"
        return Layout(kind, train * config.actor_gpus, engines, tp)
    kind = "disaggregated" if not config.colocate else "time-sliced" if config.offload else "resident"
    return Layout(kind, config.actor_gpus, engines, ranks)


def own_parts(config: RunConfig, work: Work, found: Found, known: Measured | None) -> Parts | None:
    """None where the layout or the transport is not one of the model's on this cluster, or does not fit."""
    layout = own_layout(config, found.cluster)
    if layout is None:
        return None
    mode, way = config.update_weight_mode, config.update_weight_transport
    wanted = "disk delta" if (mode, way) == ("delta", "disk") else way
    _, _, parts = parts_of(work, layout, found, known)
    return next((one for one in parts if one.update.transport == wanted), None)


def own_prediction(
    config: RunConfig, work: Work, found: Found, known: Measured | None, steps: int | None = None
) -> Prediction | None:
    """By the control plane in virtual time, under the run's own options."""
    parts = own_parts(config, work, found, known)
    return None if parts is None else simulate(parts, config, {}, steps)
