"""Servers that can't be handed a bound socket: their port was free a moment ago."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from turnout.core.errors import EngineDead

T = TypeVar("T")
TRIES = 3
log = logging.getLogger(__name__)


async def on_a_free_port(start: Callable[[], Awaitable[T]], taken: Callable[[str], bool]) -> T:
    """What `start` gives, which chooses a port itself. Where somebody else took that before its use, as `taken`
    says of how the server ended, another is tried. Raises as `start`, and the last EngineDead after TRIES."""
    for left in reversed(range(TRIES)):
        try:
            return await start()
        except EngineDead as fault:
            if not left or not taken(fault.reason):
                raise
            log.warning("%s: its port was taken by somebody else; another one is tried", fault.engine_id)
    raise AssertionError("the last try returns or raises")
