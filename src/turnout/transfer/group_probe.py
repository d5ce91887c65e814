"""The child of `turnout check` that makes a process group with the engines, as an update would, and takes it down:
`python -m turnout.transfer.group_probe` with one JSON object on stdin, one on stdout.

Asked: {"engines": [{"url", "id"}], "deadline_s", "api_key", "admin_key", "ca"}, the last three may be null; told:
{"fault", "place"}, where the fault is empty when all came together, and `place` is host and port of the meeting
point. A process of its own, because torch is not for commands that only look, and a group that does not come
together holds its thread. No weight is sent.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from turnout.core.errors import TurnoutError
from turnout.placement.real import DiskStore, RealClock
from turnout.serving.access import Access, authorities
from turnout.serving.address import parse_address
from turnout.serving.client import EngineClient
from turnout.serving.weights_client import EngineWeights
from turnout.transfer.group import GroupTransport
from turnout.weights.store import WeightStore


async def probe(asked: dict[str, Any]) -> dict[str, str]:
    """What came of it."""
    clock, ca = RealClock(), asked["ca"]
    tls = None if ca is None else authorities(Path(ca), "ca")
    access = Access(asked["api_key"], asked["admin_key"], tls)
    clients = [
        EngineClient(row["id"], parse_address(row["url"], row["id"]), clock, access)
        for row in asked["engines"]
    ]
    engines = [EngineWeights(client) for client in clients]
    nowhere = WeightStore(Path(), DiskStore(), Path(), 0)  # a group keeps nothing there
    group = GroupTransport(nowhere, clock, 0)
    try:
        await group.open(engines, asked["deadline_s"])
        fault = ""
    except TurnoutError as error:
        fault = str(error)
    place = group.place
    await group.close()
    for client in clients:
        await client.close()
    return {"fault": fault, "place": place}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(probe(json.load(sys.stdin)))))
