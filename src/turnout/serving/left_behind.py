"""Engines of this run that the controller before this one left running: taken over, or ended.

An engine tells its process in its ready file; a process is ours where its command line names the engine program
and that very file. Promises: no other process is touched; one is taken over only if it was started with the very
command that would start it now, and answers; every other one is ended, told by name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from turnout.core.errors import DeadlineExceeded, EngineError
from turnout.core.ports import Clock
from turnout.placement.processes import FoundProcess, OwnProcess
from turnout.serving.launcher import READY, STOP_GRACE_S, Engine, EngineLaunch, client_of, command_of

log = logging.getLogger(__name__)
ADOPT_S = 10.0
OWNER_FLAG = "--parent-pid"


def _running(ready: Path, clock: Clock) -> tuple[FoundProcess, list[str]] | None:
    """The process that a ready file tells of, and its command; None where it has ended, or is another one."""
    try:
        name, pid = _engine_id(ready), int(json.loads(ready.read_text())["pid"])
        found = FoundProcess(f"engine {name}", pid, ready.with_name(f"{name}.log"), clock)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    with contextlib.suppress(OSError):  # it has ended
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        ours = command[1:3] == ["-m", "turnout.engine"] and str(ready) in command
        if ours and os.getpgid(pid) == pid and found.alive:
            return found, command
    found.close()
    return None


def _engine_id(ready: Path) -> str:
    return ready.name.removesuffix(READY)


def _unowned(command: Sequence[str]) -> list[str]:
    """A command without who started it."""
    at = command.index(OWNER_FLAG) if OWNER_FLAG in command else len(command)
    return [*command[:at], *command[at + 2 :]]


async def taken_over(spec: EngineLaunch, clock: Clock, own: OwnProcess | None = None) -> Engine | None:
    """The engine of this launch, where the controller before left it, or this one has it already (`own`); None
    where it must be started."""
    ready, command = command_of(spec)
    if own is None:
        if (found := _running(ready, clock)) is None:
            return None
        process, its = found
        if _unowned(its) != _unowned(command):
            await _ended(process, "it was started with other options")
            return None
    else:
        process = own
    client = client_of(spec, json.loads(ready.read_text()), clock)
    try:
        await client.adopt(os.getpid(), ADOPT_S)
    except (EngineError, DeadlineExceeded) as fault:
        await client.close()
        await _ended(process, str(fault))
        return None
    log.info("%s, process %d, is taken over from the controller before", process.name, process.pid)
    return Engine(process, client, kept=True)


async def end_left_behind(folder: Path, clock: Clock, but: frozenset[str] = frozenset()) -> None:
    """Ends the engines whose logs and ready files lie in the folder, but these."""
    for ready in sorted(folder.glob(f"*{READY}")):
        if _engine_id(ready) not in but and (found := _running(ready, clock)) is not None:
            await _ended(found[0], "this incarnation has no use for it")


async def _ended(process: OwnProcess, why: str) -> None:
    log.warning(
        "%s, process %d, was left by the controller before and is ended: %s", process.name, process.pid, why
    )
    await process.stop(STOP_GRACE_S)
