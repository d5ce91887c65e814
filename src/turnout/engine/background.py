"""Work on weights beside the serving: staging, digests, audits, on threads that yield to those that make tokens.

Promises: on Linux these threads, and those that their libraries start, have a lower priority than the rest of the
process; elsewhere they run like any other, and that is logged once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
THREADS, NICENESS = 4, 10


def _yielding() -> None:
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    else:
        log.info("work on weights runs at the priority of serving: %s has none per thread", sys.platform)


_POOL = ThreadPoolExecutor(THREADS, "weights", _yielding)


async def in_background(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `work`, run on such a thread; a caller that is cancelled leaves it to its end."""
    return await asyncio.get_running_loop().run_in_executor(_POOL, lambda: work(*args, **kwargs))
