"""`python -m turnout.engine --model-path DIR ...`: what a launcher spawns. Flags are EngineSettings' fields."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from turnout.core.errors import ConfigError
from turnout.engine.settings import EngineSettings
from turnout.placement.processes import POOL_ENVIRONMENT, collector_off

SHORT = {  # SGLang's other names
    "tp_size": ("--tp", "--tensor-parallel-size"),
    "ep_size": ("--ep", "--expert-parallel-size"),
}
ADMIN_TOKEN_ENV = "TURNOUT_ENGINE_ADMIN_TOKEN"  # noqa: S105 - the variable's name, not a secret


def parser() -> argparse.ArgumentParser:
    """The command line; defaults are those of EngineSettings."""
    build = argparse.ArgumentParser(
        prog="turnout-engine",
        description="The embedded inference engine: SGLang's HTTP API over a transformers checkpoint.",
        epilog=f"The admin token is read from {ADMIN_TOKEN_ENV}.",
    )
    kinds = {
        "model_path": Path,
        "context_length": int,
        "served_model_name": str,
        "custom_update_weight_pre_read_path": str,
        "request_timeout_s": float,
        "update_timeout_s": float,
    }
    for name, declared in EngineSettings.__dataclass_fields__.items():
        if name in ("admin_token", "allowed_roots"):
            continue
        kind = kinds.get(name, type(declared.default))
        if kind is bool:
            build.add_argument(f"--{name.replace('_', '-')}", dest=name, action="store_true")
            continue
        required = name == "model_path"
        default = None if required else declared.default
        build.add_argument(
            f"--{name.replace('_', '-')}",
            *SHORT.get(name, ()),
            dest=name,
            type=kind,
            default=default,
            required=required,
            help="" if required else f"default {default}",
        )
    build.add_argument("--allowed-root", type=Path, action="append", default=[], help="may be repeated")
    build.add_argument("--ready-file", type=Path, help="gets url, pid and engine id once the engine serves")
    build.add_argument("--detached", action="store_true", help="outlive the parent process")
    build.add_argument("--parent-pid", type=int, help="end when this process is no longer the parent")
    build.add_argument(
        "--linger-s",
        type=float,
        default=0.0,
        help="outlive it for so long, for another one to adopt this engine",
    )
    return build


def settings_of(arguments: argparse.Namespace) -> EngineSettings:
    """Raises ConfigError with every fault."""
    names = [n for n in EngineSettings.__dataclass_fields__ if n not in ("admin_token", "allowed_roots")]
    return EngineSettings(
        **{name: getattr(arguments, name) for name in names},
        admin_token=os.environ.get(ADMIN_TOKEN_ENV) or None,
        allowed_roots=tuple(arguments.allowed_root),
    )


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings = settings_of(arguments)
    except ConfigError as fault:
        logging.getLogger(__name__).error("%s", fault)
        return fault.exit_status
    for name, value in POOL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # read once, when libgomp is loaded with torch
    with collector_off():
        from turnout.engine.main import Lifetime, run_engine  # noqa: PLC0415 - torch only after the flags are right

    given = arguments
    return run_engine(settings, Lifetime(given.ready_file, given.detached, given.parent_pid, given.linger_s))


if __name__ == "__main__":
    sys.exit(main())
