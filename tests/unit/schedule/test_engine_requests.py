"""Requests about engines: what one that can't be taken or done costs the others, and the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from turnout.core.ports import Clock
from turnout.placement.real import DiskStore, RealClock
from turnout.protocol.engine_requests import ANSWERED, ASKED, FOLDER, EngineAnswer, EngineRequest
from turnout.schedule.engine_requests import AddressFile, EngineRequests, beside

NO_ENGINES = SimpleNamespace(views=tuple, plans={})


class Faulty(DiskStore):
    """A disk that can't read, or no longer has, what it lists."""

    def names(self, folder: Path) -> list[str]:
        return sorted([*super().names(folder), f"gone{ASKED}"]) if folder.is_dir() else []

    def read(self, path: Path) -> bytes:
        if path.name.startswith("bad"):
            raise PermissionError(13, "Permission denied", str(path))
        return super().read(path)


async def answer_to(request: EngineRequest, changes: Any, folder: Path) -> EngineAnswer:
    """What is answered while requests lie beside it that can't be read."""
    clock: Clock = RealClock()
    said: list[str] = []
    async with beside({"it": EngineRequests(changes, folder.parent, clock, Faulty()).run()}, said.append):
        while not folder.is_dir():  # what lies there before is removed
            await clock.sleep(0.01)
        for number in range(9):
            (folder / f"bad{number}{ASKED}").write_bytes(b"{}")
        DiskStore().publish_file(folder / f"good{ASKED}", request.encode())
        while not (folder / f"good{ANSWERED}").exists():
            assert not said
            await clock.sleep(0.01)
    return EngineAnswer.decode((folder / f"good{ANSWERED}").read_bytes())


def test_requests_that_cannot_be_read_or_are_gone_keep_nobody_else_waiting(
    tmp_path: Path, caplog: Any
) -> None:
    changes = SimpleNamespace(engines=NO_ENGINES)
    answer = asyncio.run(asyncio.wait_for(answer_to(EngineRequest("ls"), changes, tmp_path / FOLDER), 20))
    assert answer.done
    assert "bad0" in caplog.text and "Permission denied" in caplog.text and "gone" not in caplog.text


def test_a_disk_that_is_full_while_an_engine_starts_is_answered(tmp_path: Path) -> None:
    async def add_own(count: int) -> str:
        raise OSError(28, "No space left on device")

    changes = SimpleNamespace(engines=NO_ENGINES, add_own=add_own)
    asked = answer_to(EngineRequest("add"), changes, tmp_path / FOLDER)
    answer = asyncio.run(asyncio.wait_for(asked, 20))
    assert not answer.done and "No space left on device" in answer.text


def told_while(work: Callable[[list[str]], Any], until: Callable[[list[str]], bool]) -> list[str]:
    async def main() -> list[str]:
        said: list[str] = []
        async with beside({"the work": work(said)}, said.append):
            while not until(said):
                await RealClock().sleep(0.01)
        return said

    return asyncio.run(asyncio.wait_for(main(), 20))


def test_a_fault_beside_the_run_is_told_when_it_happens_and_does_not_end_the_run() -> None:
    async def fails() -> None:
        raise OSError("gone")

    assert told_while(lambda _: fails(), bool) == ["the work is heeded no more: OSError('gone')"]


def test_an_odd_address_in_the_file_is_told_and_the_file_followed_on(tmp_path: Path) -> None:
    file, expected = tmp_path / "engines", []
    file.write_text("http://[v1.a:b]:80\n")
    engines = SimpleNamespace(plans={}, expect=lambda plan: expected.append(plan.engine_id))
    changes: Any = SimpleNamespace(engines=engines)

    class Quick(RealClock):
        async def sleep(self, seconds: float) -> None:
            await asyncio.sleep(0.01)

    def work(said: list[str]) -> Any:
        return AddressFile(changes, file, set(), Quick(), said.append).run()

    def until(said: list[str]) -> bool:
        if said:
            file.write_text("host1:80\n")
        return bool(expected)

    assert "v1.a:b" in told_while(work, until)[0]
    assert expected[0] == "host1:80"
