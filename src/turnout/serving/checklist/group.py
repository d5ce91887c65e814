"""Whether trainer and engines come together in a process group, tried in a child process. See group_probe there."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence

from turnout.core.errors import DeadlineExceeded
from turnout.core.ports import Clock
from turnout.placement.processes import child_environment
from turnout.serving.checklist.lines import Finding, failed, proved, unknown
from turnout.serving.client import EngineClient

CHILD = "turnout.transfer.group_probe"
START_S = 60.0  # of the child, which loads torch; and for the engines to leave the group again


async def try_group(
    engines: Sequence[EngineClient], keys: Mapping[str, str | None], clock: Clock, deadline_s: float
) -> Finding:
    """`engines` is not empty; `keys` are api_key, admin_key and ca, the file of authorities. Never raises for what
    the child does."""
    rows = [{"url": engine.address.url, "id": engine.engine_id} for engine in engines]
    asked = json.dumps({"engines": rows, "deadline_s": deadline_s, **keys})
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", CHILD, stdin=pipe, stdout=pipe, stderr=pipe, env=child_environment(1)
    )
    try:
        limit_s = START_S + deadline_s
        out, said = await clock.within(limit_s, "the group to be tried", process.communicate(asked.encode()))
    except DeadlineExceeded as fault:
        return failed(str(fault))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = said.decode(errors="replace").strip().splitlines()[-1:]
        return unknown(f"the child that tries it ended with {process.returncode}: {''.join(last)[:300]}")
    told = json.loads(out)
    if told["fault"]:
        return failed(
            f"engines and trainer do not come together at {told['place'] or 'any port'}: {told['fault']}"
        )
    return proved(f"{len(rows)} engines joined at {told['place']} and left again")
