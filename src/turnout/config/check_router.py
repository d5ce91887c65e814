"""What must hold between the options of the router and the others. Rules as in turnout.config.checks."""

from __future__ import annotations

from collections.abc import Iterator

from turnout.config.run_config import RunConfig
from turnout.core.errors import Fault

# Arguments of routers that the run decides, and what to give instead. A sampler tells an engine's death from a
# fault of the request, goes on with the tokens that exist and bounds what is in flight: a router that retries,
# waits or refuses would undo that.
DECIDED = {
    "host": "nothing: a router listens on loopback",
    "port": "nothing: a free port is chosen",
    "prometheus-host": "nothing: loopback",
    "prometheus-port": "nothing: a free port is chosen",
    "policy": "--router-policy",
    "worker-urls": "nothing: engines enter when they have proved their weights",
    "prefill": "nothing: engines enter when they have proved their weights",
    "decode": "nothing: engines enter when they have proved their weights",
    "service-discovery": "nothing: engines enter when they have proved their weights",
    "pd-disaggregation": "nothing: it follows from the engines",
    "disable-retries": "nothing: samples go on from the tokens that they have",
    "disable-circuit-breaker": "nothing: the run watches its engines",
    "disable-health-check": "nothing: the run watches its engines",
}


def only_with_a_router(c: RunConfig) -> Iterator[Fault]:
    """A router of the run's own has a policy and arguments; one of somebody else has its own."""
    own = c.router_kind != "direct" and c.sglang_router_ip is None
    for flag, value in (("--router-policy", c.router_policy), ("--router-args", c.router_args)):
        if value and not own:
            reason = "the run starts no router" if c.router_kind == "direct" else "that router has its own"
            yield Fault(flag, str(value), reason, "give --router smg, without --sglang-router-ip")


def address_is_whole(c: RunConfig) -> Iterator[Fault]:
    if (c.sglang_router_ip is None) != (c.sglang_router_port is None):
        missing = "--sglang-router-ip" if c.sglang_router_ip is None else "--sglang-router-port"
        yield Fault(missing, "", "a router of somebody else has a host and a port", "give both or none")
    elif c.sglang_router_ip is not None and c.router == "direct":
        yield Fault(
            "--sglang-router-ip", c.sglang_router_ip, "--router direct asks no router", "leave one out"
        )


def router_arguments_are_free(c: RunConfig) -> Iterator[Fault]:
    for name, value in c.router_args.items():
        if name in DECIDED:
            reason = f"{name} is decided by the run"
            yield Fault("--router-args", str(value), reason, f"give {DECIDED[name]}")
        elif name.startswith("-") or "_" in name:
            right = name.lstrip("-").replace("_", "-")
            yield Fault("--router-args", name, "is a name with inner dashes only", f"write {right}")


def stock_engines_are_alike(c: RunConfig) -> Iterator[Fault]:
    """A router can't tell engines of different versions apart, and a stock one names its cache by what the request
    says: of the cache of one version another would be served."""
    if c.router_kind != "direct" and c.engine == "sglang" and c.max_engine_lag > 0:
        lag = str(c.max_engine_lag)
        yield Fault("--max-engine-lag", lag, "a router mixes SGLang engines of several versions", "give 0")


ROUTER_CHECKS = (only_with_a_router, address_is_whole, router_arguments_are_free, stock_engines_are_alike)
