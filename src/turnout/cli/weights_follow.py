"""`turnout weights follow`: keeps a local checkpoint, and the engine beside it, at the newest version of a store.

Promises: imports neither torch nor transformers; one line for each version and each new fault on stdout; SIGTERM or
Ctrl-C ends it with 0 after the step under way, or within STOP_GRACE_S where that waits; exit status 2 for a folder
or a store that is not this run's, 4 where the engine does not answer as it should, 5 where it serves other weights
than it was told to, 7 after --deadline.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from turnout.cli.options import Parser, depot_of, token_from
from turnout.core.errors import ConfigError, Fault
from turnout.core.version import label_counter

if TYPE_CHECKING:
    from turnout.transfer.follower import Follower, FollowPlan

PRE_READ = "--custom-update-weight-pre-read-path"
STOP_GRACE_S = 5.0
FOLLOWER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def command(argv: list[str]) -> int:
    """Follows until it is told to end, or until --once or --until is reached."""
    arguments = _parser().parse_args(argv)
    asyncio.run(_follow(arguments))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="turnout weights follow", description="Follow a weight store.")
    add = parser.add_argument
    add(
        "--store",
        required=True,
        help="the trainer's --update-weight-disk-dir: a path or an object store's URL",
    )
    add("--local-checkpoint", type=Path, required=True, help="folder on this host, kept current in place")
    add("--engine", help="URL of the engine that loads it; without one only the folder is kept")
    add("--engine-token-env", metavar="NAME", help="environment variable that holds the engine's admin token")
    add("--trust-label", action="store_true", help="accept an engine that can only name its weights")
    add(
        "--poll-interval", type=float, default=1.0, metavar="S", help="between looks at the store (default 1)"
    )
    add("--engine-deadline", type=float, default=600.0, metavar="S", help="to prove a version (default 600)")
    add(
        PRE_READ, metavar="FILE.py:FUNCTION", help="called with the local folder that a version is fetched to"
    )
    add("--follower-id", default=socket.gethostname(), help="names its position in the store (default: host)")
    ends = parser.add_mutually_exclusive_group()
    ends.add_argument("--once", action="store_true", help="end when the newest version of now is served")
    ends.add_argument("--until", metavar="VERSION", help="end when this version or a newer one is served")
    add(
        "--deadline",
        type=float,
        default=600.0,
        metavar="S",
        help="of --once and --until (default 600); exit status 7 after it",
    )
    return parser


async def _follow(arguments: argparse.Namespace) -> None:
    from turnout.placement.real import RealClock
    from turnout.serving.address import parse_address
    from turnout.transfer.followed_engine import HttpEngine
    from turnout.transfer.follower import Follower, Phases, Tools
    from turnout.weights.catalog import StoreReader
    from turnout.weights.local_checkpoint import LocalCheckpoint

    clock, plan = RealClock(), _plan(arguments)
    phases = Phases(clock)
    local = LocalCheckpoint(arguments.local_checkpoint, watch=phases.begin)
    engine = None
    if arguments.engine is not None:
        address, token = (
            parse_address(arguments.engine, "--engine"),
            token_from(arguments.engine_token_env, "--engine-token-env"),
        )
        engine = HttpEngine(address, token, clock, arguments.trust_label)
    tools = Tools(clock, phases, lambda line: print(line, flush=True))
    follower = Follower(StoreReader(depot_of(arguments.store)), local, engine, plan, tools)
    _end_on_signals(follower)
    try:
        await follower.run()
    except asyncio.CancelledError:
        print("ended while it waited; the next start goes on from there", flush=True)
    finally:
        local.close()
        if engine is not None:
            await engine.close()


def _end_on_signals(follower: Follower) -> None:
    """A step that is under way may end; what waits longer, as for an engine, is left."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def end() -> None:
        follower.stop()
        loop.call_later(STOP_GRACE_S, task.cancel)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)


def _plan(arguments: argparse.Namespace) -> FollowPlan:
    from turnout.transfer.follower import NEWEST, FollowPlan
    from turnout.weights.hooks import load_hook

    if not FOLLOWER_ID.fullmatch(arguments.follower_id):
        raise ConfigError(
            Fault("--follower-id", arguments.follower_id, "names a file: letters, digits, . _ -")
        )
    until = NEWEST if arguments.once else None
    if arguments.until is not None:
        digits = arguments.until.removeprefix("v")
        until = label_counter(arguments.until) or (int(digits) if digits.isdecimal() else None)
        if until is None:
            raise ConfigError(
                Fault("--until", arguments.until, "is no version: give its number or its label")
            )
    for flag in ("poll_interval", "engine_deadline", "deadline"):
        value = getattr(arguments, flag)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(Fault(f"--{flag.replace('_', '-')}", str(value), "must be above 0 s"))
    hook = arguments.custom_update_weight_pre_read_path
    return FollowPlan(
        arguments.follower_id,
        arguments.poll_interval,
        arguments.engine_deadline,
        until,
        arguments.deadline if until is not None else None,
        pre_read=load_hook(PRE_READ, hook) if hook is not None else None,
    )
