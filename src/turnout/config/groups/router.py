"""Options of the request router between samples and engines."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from turnout.config.option import Options, option


class RouterOptions(Options):
    title: ClassVar[str] = "Router"

    router: Literal["direct", "smg", "sglang-router"] | None = option(
        None,
        "Who chooses the engine of a request: the run itself (direct), or a router from PyPI that it starts.",
        unset="direct; smg where another option of a router is given, sglang-router with --sglang-router-ip",
    )
    router_policy: str | None = option(
        None,
        "How the router chooses, by its own name: `manual` keeps the requests of a prompt on one engine, at first "
        "the one with the fewest requests.",
        unset="manual",
        pattern=r"^[a-z_]+$",
    )
    sglang_router_ip: str | None = option(
        None,
        "Host of a router that somebody else runs: none is started. Workers that it has and that answer no more "
        "are removed from it; it is refused where it has workers of others.",
        unset="the run starts its own",
        min_length=1,
    )
    sglang_router_port: int | None = option(
        None, "Port of that router.", unset="the run starts its own", ge=1, le=65535
    )
    router_args: dict[str, Any] = option(
        {},
        "Further arguments of the router, by name without dashes; true is a switch. `--router-NAME VALUE` is "
        "another way to write one.",
    )
