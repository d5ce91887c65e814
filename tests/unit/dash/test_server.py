"""The dashboard's endpoints over a small run written by the classes that write a real one."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from benchmarks.dash_run import HOSTILE, RunWriter, Shape

from turnout.core.errors import ConfigError
from turnout.dash.server import PAGE, DashServer, DashSettings
from turnout.dash.source import RunSource

Ask = Callable[..., Awaitable[Any]]
CAUSES = [[f"reward failed: {HOSTILE}", 3], ["stale: lag 3 > 2", 3]]
SMALL = Shape(groups=4, members=2, tokens=6, engines=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    writer = RunWriter(root, SMALL, 1000.0)
    for _ in range(45):
        writer.step()
    writer.close(ended=True)
    return root


def asked(
    root: Path, work: Callable[[TestClient[Any, Any]], Awaitable[Any]], token: str | None = None
) -> Any:
    async def body() -> Any:
        settings = DashSettings(token=token)
        server = DashServer(RunSource(root, lambda _: None), settings)
        async with TestClient(TestServer(server.app())) as client:
            return await work(client)

    return asyncio.run(body())


def rows(root: Path, *paths: str) -> list[tuple[int, Any]]:
    async def work(client: TestClient[Any, Any]) -> list[tuple[int, Any]]:
        found = []
        for path in paths:
            async with client.get(path) as answer:
                found.append((answer.status, await answer.json()))
        return found

    return asked(root, work)


def test_every_view_of_a_run(run: Path) -> None:
    names = ("overview", "distributions", "versions", "health", "states")
    (_, over), (_, shapes), (_, versions), (_, health), (_, states) = rows(
        run, *(f"/api/live/{n}" for n in names)
    )
    assert over["head"]["status"] == "finished" and over["head"]["step"] == 45
    assert len(over["view"]["rows"]) == 45 and over["view"]["rows"][3]["seconds/train"] > 0
    assert [one["step"] for one in over["view"]["evals"]] == [0, 20, 40]
    assert all(one["low"] < one["score"] < one["high"] for one in over["view"]["evals"])
    assert sum(n for row in shapes["view"]["rows"] for _, n in row["lengths"]) == 2 * (45 * 4 - 6)
    assert shapes["view"]["rows"][10]["drops"] == [["stale: lag 3 > 2", 1]]
    newest = versions["view"]["rows"][-1]
    assert newest["encoding"] == "packed" and newest["committed"] > newest["published"]
    assert versions["view"]["serving"] == {newest["key"]: ["engine-0", "engine-1"]}
    assert health["view"]["fault_counts"] == {"engine lost": 1, "engine fenced": 1}
    assert [one["lives"] for one in health["view"]["engines"]] == [1, 2]
    assert states["view"] == {"states": {"trained": 174, "dropped": 6}, "why": "", "causes": CAUSES}


def test_only_what_changed_is_told_again(run: Path) -> None:
    async def work(client: TestClient[Any, Any]) -> list[Any]:
        first = await (await client.get("/api/live/overview")).json()
        known = f"epoch={first['epoch']}&revision={first['revision']}"
        again = await (await client.get(f"/api/live/overview?{known}")).json()
        other = await (await client.get(f"/api/live/overview?epoch=77&revision={first['revision']}")).json()
        return [first, again, other]

    first, again, other = asked(run, work)
    assert first["whole"] and "view" not in again and not again["whole"] and again["head"] == first["head"]
    assert other["whole"] and len(other["view"]["rows"]) == 45


def test_lanes_of_the_newest_steps_and_of_any_time(run: Path) -> None:
    (_, newest), (_, early), (bad, _) = rows(
        run, "/api/lanes", "/api/lanes?start=1004.0&end=1008.0", "/api/lanes?start=nan&end=1"
    )
    assert bad == 400 and newest["end"] == newest["last"] and early["start"] == 1004.0
    lanes = {row["lane"]: row for row in early["lanes"]}
    assert list(lanes) == ["trainer", "update", "engine-0", "engine-1"]
    assert {name for name, *_ in lanes["trainer"]["spans"]} >= {"train", "idle"}
    assert lanes["engine-0"]["shares"]["rollout"] == pytest.approx(0.5, abs=0.05)
    assert all(1004 <= start <= end <= 1008 for row in early["lanes"] for _, start, end, _ in row["spans"])


def test_lanes_are_read_again_only_when_their_stretch_may_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter(tmp_path / "run", SMALL, 1000.0)
    for _ in range(10):
        writer.step()
    source = RunSource(tmp_path / "run", lambda _: None)
    read: list[float] = []
    between = source.reader.between
    monkeypatch.setattr(source.reader, "between", lambda *times: read.append(times[1]) or between(*times))
    first = source.lanes(None, None)
    assert source.lanes(None, None) == first and len(read) == 1  # a run that ended
    writer.step()
    assert source._kept is not None
    source._kept.due = 0.0
    newer = source.lanes(None, None)
    assert newer["last"] > first["last"] and newer["revision"] > first["revision"] and len(read) == 2
    source._kept.due = float("inf")  # beyond it already
    writer.step()
    again = source.lanes(None, None)
    assert len(read) == 2 and again["lanes"] == newer["lanes"] and again["last"] > newer["last"]
    source._kept.due = time.monotonic() + 1000
    assert source.lanes(1004.0, 1008.0)["lanes"] != newer["lanes"] and len(read) == 3
    assert source._kept.due < time.monotonic() + 1000
    writer.close(ended=False)


def test_groups_by_state_are_counted_after_the_last_change_and_told(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", SMALL, 1000.0)
    writer.step()

    async def work(client: TestClient[Any, Any], source: RunSource) -> None:
        async def states(known: Any) -> Any:
            query = f"epoch={known['epoch']}&revision={known['revision']}" if known else ""
            return await (await client.get(f"/api/live/states?{query}")).json()

        first = await states(None)
        assert "view" not in await states(first)
        writer.step()
        writer.close(ended=True)
        early = await states(first)  # counted before the end
        assert early["view"]["states"] == first["view"]["states"] == {"trained": 4}
        source._counted.due = 0.0
        late = await states(early)
        assert late["view"]["states"] == {"trained": 8} and "view" not in await states(late)
        source._counted.due = 0.0
        (source.root / "ledger.sqlite").rename(tmp_path / "away")
        lost = await states(None)
        assert lost["view"]["states"] == {"trained": 8} and "is not there" in lost["view"]["why"]
        (tmp_path / "away").rename(source.root / "ledger.sqlite")
        source._counted.due = 0.0
        found = await states(lost)
        assert found["view"]["why"] == "" and "view" not in await states(found)

    async def body() -> None:
        source = RunSource(tmp_path / "run", lambda _: None)
        async with TestClient(TestServer(DashServer(source, DashSettings()).app())) as client:
            await work(client, source)

    asyncio.run(body())


def test_groups_are_paged_and_filtered(run: Path) -> None:
    page, dropped, step, slow = rows(
        run,
        "/api/groups?limit=2",
        "/api/groups?state=dropped&cause=stale:+lag+3+>+2&limit=100",
        "/api/groups?step=3",
        "/api/groups?order=slowest&limit=5",
    )
    last = page[1]["groups"][-1]["group"]
    (_, more), (_, known) = rows(run, f"/api/groups?limit=2&below={last}", f"/api/groups/{last}")
    assert [row["group"] for row in more["groups"]] == ["g00000177.0", "g00000176.0"]
    assert known["group"] == last and known["stored"]
    assert len(dropped[1]["groups"]) == 3 and not any(row["stored"] for row in dropped[1]["groups"])
    assert {row["trained"] for row in step[1]["groups"]} == {3} and len(step[1]["groups"]) == 3
    seconds = [row["seconds"] for row in slow[1]["groups"]]
    assert len(seconds) == 5 and seconds == sorted(seconds, reverse=True)


def test_one_trajectory_by_token(run: Path) -> None:
    (_, group), (_, member), (_, late) = rows(
        run,
        "/api/groups/g00000178.0",
        "/api/groups/g00000178.0/members/1",
        "/api/groups/g00000178.0/members/1?first=1",
    )
    assert [move["event"] for move in group["history"]] == ["admit", "start", "complete", "take", "train"]
    assert group["prompt_missing"] and len(group["members"]) == 2
    count = member["count"]
    assert count == len(member["ids"]) == len(member["logprobs"]) == len(member["mask"])
    assert member["mask"][0] == 0 and member["texts"] is None and "tokenizer.json" in member["texts_missing"]
    assert member["text"].startswith(HOSTILE) and sum(n for n, _, _ in member["versions"]) == count
    assert member["versions"][0][2] in (0, 1, 2) and member["engines"] == [[count, "engine-1"]]
    assert late["first"] == 1 and late["ids"] == member["ids"][1:]


def test_forgotten_tokens_and_drops_are_explained(run: Path) -> None:
    (_, old), (_, dropped), (status, _) = rows(
        run, "/api/groups/g00000000.0", "/api/groups/g00000043.0", "/api/groups/g00000000.0/members/0"
    )
    assert not old["stored"] and "two newer checkpoints" in old["missing"] and old["members"][0]["tokens"] > 0
    assert dropped["cause"] == "stale: lag 3 > 2" and "dropped keeps none" in dropped["missing"]
    assert status == 404


@pytest.mark.parametrize(
    "path, status",
    [
        ("/api/live/nothing", 404),
        ("/api/groups?state=burnt", 400),
        ("/api/groups?step=x", 400),
        ("/api/groups?below=g1;DROP", 400),
        ("/api/groups?cause=" + "x" * 501, 400),
        ("/api/groups/..%2f..%2fetc", 400),
        ("/api/groups/g00000001.0'--", 400),
        ("/api/groups/g99999999.0", 404),
        ("/api/groups/g00000178.0/members/x", 400),
        ("/api/groups/g00000178.0/members/99", 404),
        ("/api/groups/g00000178.0/members/1?first=-5", 200),
        ("/page/../server.py", 404),
        ("/server.py", 404),
    ],
)
def test_what_is_asked_is_checked(run: Path, path: str, status: int) -> None:
    [(found, row)] = rows(run, path)
    assert found == status and (status == 200 or set(row) == {"error"})


def test_the_page_runs_its_own_script_only_and_comes_whole(run: Path) -> None:
    async def work(client: TestClient[Any, Any]) -> dict[str, Any]:
        found = {}
        for path in PAGE:
            async with client.get(path) as answer:
                found[path] = answer.status, dict(answer.headers), await answer.text()
        return found

    for path, (status, headers, text) in asked(run, work).items():
        assert status == 200 and text, path
        assert "script-src 'self'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
        assert "http://" not in text.replace("http://www.w3.org", "") and "https://" not in text
        assert "innerHTML" not in text and "document.write" not in text


def test_beyond_loopback_a_token_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"--host = 0\.0\.0\.0: beyond loopback a token is needed"):
        DashSettings(host="0.0.0.0").check()
    DashSettings(host="0.0.0.0", token="t").check()
    DashSettings(host="::1").check()


def test_the_token_by_header_or_as_a_browsers_password(run: Path) -> None:
    basic = "Basic " + base64.b64encode(b"me:secret").decode()
    wrong = "Basic " + base64.b64encode(b"secret:me").decode()

    async def work(client: TestClient[Any, Any]) -> list[int]:
        found = []
        for given in (None, "Bearer secret", basic, wrong, "Bearer secre", "Basic !", "Digest secret"):
            headers = {} if given is None else {"Authorization": given}
            for path in ("/", "/api/live/overview"):
                async with client.get(path, headers=headers) as answer:
                    found.append(answer.status)
                    if answer.status == 401:
                        assert "Basic" in answer.headers["WWW-Authenticate"]
        return found

    assert asked(run, work, token="secret") == [401, 401, 200, 200, 200, 200, *[401] * 8]


def test_a_token_that_is_no_text_is_refused(run: Path) -> None:
    async def work(client: TestClient[Any, Any]) -> list[bytes]:
        found = []
        for given in (b"Bearer \xff", b"Basic \xff"):
            reader, writer = await asyncio.open_connection(client.host, client.port)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: %s\r\n\r\n" % given)
            found.append((await reader.readline()).split()[1])
            writer.close()
        return found

    assert asked(run, work, token="secret") == [b"401", b"401"]


def test_a_file_that_can_not_be_read_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "events.jsonl")

    monkeypatch.setattr(RunSource, "lanes", fails)
    [(status, row)] = rows(run, "/api/lanes")
    assert status == 503 and "events.jsonl" in row["error"]


def test_a_name_that_another_site_points_here_is_refused(run: Path) -> None:
    async def work(client: TestClient[Any, Any]) -> list[int]:
        hosts = ("evil.example", "127.0.0.1:7860", "localhost", "[::1]:7860", "127.0.0.1.evil.example")
        return [(await client.get("/api/live/overview", headers={"Host": host})).status for host in hosts]

    assert asked(run, work) == [403, 200, 200, 200, 403]


def test_a_run_that_has_not_begun_and_a_folder_without_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        RunSource(tmp_path, lambda _: None)
    (tmp_path / "run.json").write_text("{}")
    (_, over), (status, groups) = rows(tmp_path, "/api/live/overview", "/api/groups")
    assert over["head"]["progress"] == 1.0 and over["head"]["doctor"]["text"].startswith(
        "the run has not begun"
    )
    assert status == 409 and "is not there" in groups["error"]


def test_a_ledger_that_was_replaced_is_opened_anew(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "a", SMALL, 1000.0)
    writer.step()

    async def work(client: TestClient[Any, Any]) -> list[int]:
        found = []
        for step in (0, 1):
            async with client.get("/api/groups") as answer:
                found.append(len((await answer.json())["groups"]))
            if not step:
                writer.close(ended=False)
                other = RunWriter(tmp_path / "b", SMALL, 1000.0)
                for _ in range(3):
                    other.step()
                other.close(ended=False)
                for log in (tmp_path / "a").glob("ledger.sqlite-*"):  # as a resume does
                    log.unlink()
                (tmp_path / "b" / "ledger.sqlite").replace(tmp_path / "a" / "ledger.sqlite")
        return found

    assert asked(tmp_path / "a", work) == [4, 12]


def test_json_holds_no_number_that_browsers_refuse(run: Path) -> None:
    for _, row in rows(run, "/api/live/overview", "/api/live/versions"):
        json.dumps(row, allow_nan=False)
