"""A reward with a tool that takes 0.1 to 5 seconds, most often about one (lognormal): for benchmarks.schedule."""

from __future__ import annotations

import asyncio
import hashlib
import random
from typing import Any

SHORTEST_S, MEDIAN_S, LONGEST_S, SIGMA = 0.1, 0.7, 5.0, 1.0


def tool_seconds(key: Any) -> float:
    """How long the tool takes: the same for the same key."""
    drawn = random.Random(f"tool/{key}").lognormvariate(0.0, SIGMA) * MEDIAN_S
    return min(LONGEST_S, max(SHORTEST_S, drawn))


async def reward(prompt: str, response: str, label: Any) -> float:
    """The share of digits in the response, after the tool has run."""
    del label
    key = hashlib.blake2b(f"{prompt}/{response}".encode(), digest_size=8).hexdigest()
    await asyncio.sleep(tool_seconds(key))
    return sum(letter.isdigit() for letter in response) / max(1, len(response))
