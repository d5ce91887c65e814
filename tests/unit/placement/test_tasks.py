"""Calls at once that one may leave: what is told, what is cancelled, and what nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from turnout.placement.tasks import Part, Parts


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20))


async def stubborn(release: asyncio.Event) -> None:
    """Holds on to its cancellations; not for ever, so that a test that fails ends."""
    for _ in range(5):
        try:
            await release.wait()
        except asyncio.CancelledError:
            continue


def test_results_come_in_order() -> None:
    async def late(part: Part[int], item: int) -> int:
        await asyncio.sleep(0.001 * (3 - part.at))
        return item * 2

    async def main() -> None:
        assert await Parts[int]().made([5, 6, 7], late) == [10, 12, 14]
        assert await Parts[int]().made([], late) == []

    run(main())


def test_the_first_error_ends_the_others_and_waits_for_them() -> None:
    ended: list[int] = []

    async def one(part: Part[int], item: int) -> int:
        if item == 1:
            raise ValueError("no")
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append(part.at)
        return 0

    async def main() -> None:
        with pytest.raises(ValueError, match="no"):
            await Parts[int]().made([0, 1, 2], one)
        assert ended == [0, 2]

    run(main())


def test_one_that_is_left_has_its_result_at_once_and_its_task_goes_on() -> None:
    async def main() -> None:
        release, parts = asyncio.Event(), list[Part[str]]()

        async def one(part: Part[str], item: str) -> str:
            parts.append(part)
            await stubborn(release)
            return item

        made = asyncio.ensure_future(Parts[str]().made(["a", "b"], one))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        parts[0].leave("left")
        parts[0].leave("again")
        await asyncio.sleep(0)
        assert parts[0].cancelled and not parts[1].cancelled and not made.done()
        release.set()
        assert await made == ["left", "b"]

    run(main())


@pytest.mark.parametrize("loose", [True, False])
def test_a_cancelled_whole_waits_for_those_that_are_not_loose(loose: bool) -> None:
    async def main() -> None:
        release, parts = asyncio.Event(), list[Part[None]]()

        async def one(part: Part[None], _item: int) -> None:
            part.loose = loose
            parts.append(part)
            await stubborn(release)

        made = asyncio.ensure_future(Parts[None]().made([0], one))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        made.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert made.done() == loose and parts[0].left == loose and parts[0].cancelled
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await made

    run(main())


def test_a_fault_of_one_that_was_left_is_nobodys(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        parts: list[Part[int]] = []

        async def one(part: Part[int], _item: int) -> int:
            parts.append(part)
            try:
                await asyncio.sleep(60)
            finally:
                raise ValueError("too late")
            return 1

        made = asyncio.ensure_future(Parts[int]().made([0], one))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        parts[0].leave(7)
        assert await made == [7]

    run(main())
    assert not caplog.records
