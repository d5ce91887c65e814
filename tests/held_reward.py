"""A reward that waits for a file once a run has published two versions, so that a run cannot end before a test has
seen what it waits for. It waits for nothing earlier: counted calls could be those of many groups of an async run,
none of them whole."""

import asyncio
import os
from pathlib import Path
from typing import Any

from examples.tiny_reward import share_of_digits

FREE_VERSIONS = 2
VARIABLE = "TURNOUT_TEST_GO"  # names the file, in the folder that holds the run's, which is called `run`


def _published(events: Path) -> int:
    return events.read_bytes().count(b'"VersionPublished"')


async def held(prompt: str, response: str, label: Any, **metadata: Any) -> float:
    """The share of digits in the response, from 0 to 1."""
    go = Path(os.environ[VARIABLE])
    if _published(go.with_name("run") / "events.jsonl") >= FREE_VERSIONS:
        while not go.exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.02)
    return share_of_digits(prompt, response, label, **metadata)
