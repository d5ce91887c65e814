"""The same call to several engines, where the fault of one leaves the others alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from turnout.core.errors import DeadlineExceeded, EngineError, WeightError
from turnout.serving.client import EngineClient

T = TypeVar("T")


async def outcomes(
    engines: Sequence[EngineClient], call: Callable[[EngineClient], Awaitable[T]]
) -> dict[str, T | Exception]:
    """By engine id what the call came to, or its EngineError, WeightError or DeadlineExceeded."""

    async def one(engine: EngineClient) -> T | Exception:
        try:
            return await call(engine)
        except (EngineError, WeightError, DeadlineExceeded) as fault:
            return fault

    found = await asyncio.gather(*map(one, engines))
    return {engine.engine_id: outcome for engine, outcome in zip(engines, found)}
