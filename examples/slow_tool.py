"""An async reward that waits for a tool: at once for most prompts, half a second for every fifth."""

import asyncio
from typing import Any

SECONDS = 0.5


async def share_of_digits_by_a_slow_tool(prompt: str, response: str, label: Any, **metadata: Any) -> float:
    """The share of digits in the response, from 0 to 1; slow where the label can be divided by 5."""
    if int(label) % 5 == 0:
        await asyncio.sleep(SECONDS)
    return sum(character.isdigit() for character in response) / max(1, len(response))
