"""A reward that lets two steps of examples/tiny.yaml pass and then waits for a file, so that a run cannot end
before a test has seen what it waits for."""

import asyncio
import itertools
import os
from pathlib import Path
from typing import Any

from examples.tiny_reward import share_of_digits

FREE = 64
VARIABLE = "TURNOUT_TEST_GO"  # names the file
_calls = itertools.count()


async def held(prompt: str, response: str, label: Any, **metadata: Any) -> float:
    """The share of digits in the response, from 0 to 1."""
    if next(_calls) >= FREE:
        while not Path(os.environ[VARIABLE]).exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.02)
    return share_of_digits(prompt, response, label, **metadata)
