"""Bare exchanges with an engine: any method, path and body out, status and body back, nothing interpreted.

For who tests an engine rather than uses it: a refusal is an answer here, not an error. Promises: every exchange
has a deadline; proxy variables of the environment never touch it; a cancelled call closes its connection; a
connection that is refused or cut is an EngineDead.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from turnout.core.errors import DeadlineExceeded, EngineDead
from turnout.serving.address import KEPT_ALIVE_S, Address

DONE = "[DONE]"


@dataclass(frozen=True)
class Answer:
    """One answer: status and body as it came."""

    path: str
    status: int
    text: str

    @property
    def row(self) -> Any:
        """The body as JSON, None where it is none."""
        try:
            return json.loads(self.text) if self.text else None
        except (ValueError, RecursionError):
            return None

    @property
    def message(self) -> str:
        """What the engine says, from any known shape of a refusal, else the beginning of the body."""
        row = self.row
        if isinstance(row, dict):
            error = row.get("error")
            found = error.get("message") if isinstance(error, dict) else row.get("message", error)
            if found is not None:
                return str(found)
        return self.text[:300]


class EventStream:
    """The open answer to a streaming call. `events` ends after "[DONE]" or with the body."""

    def __init__(self, path: str, response: aiohttp.ClientResponse, deadline_s: float) -> None:
        self.path, self.status = path, response.status
        self._response, self._deadline_s = response, deadline_s

    async def answer(self) -> Answer:
        """The whole body, for an answer that is no stream."""
        async with asyncio.timeout(self._deadline_s):
            return Answer(self.path, self.status, await self._response.text("utf-8", "replace"))

    async def events(self) -> AsyncIterator[Any]:
        """The data of each server-sent event: parsed JSON, or the text "[DONE]". Raises EngineDead where the
        connection is cut, DeadlineExceeded where no line comes in time, ValueError for data that is no JSON."""
        while True:
            try:
                async with asyncio.timeout(self._deadline_s):
                    line = (await self._response.content.readline()).decode("utf-8").strip()
                    ended = not line and self._response.content.at_eof()
            except TimeoutError:
                raise DeadlineExceeded(f"the next event of {self.path}", self._deadline_s) from None
            except (aiohttp.ClientError, ConnectionError) as fault:
                raise _dead(self.path, fault) from fault
            if ended:
                return
            if line.startswith("data:"):
                data = line.removeprefix("data:").strip()
                yield DONE if data == DONE else json.loads(data)
                if data == DONE:
                    return


class Exchange:
    """Bare HTTP with one engine. Owns one connection pool: `close` it."""

    def __init__(self, address: Address, token: str | None = None, deadline_s: float = 60.0) -> None:
        self.address, self._token, self._deadline_s = address, token, deadline_s
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, path: str) -> Answer:
        return await self.send("GET", path)

    async def post(self, path: str, body: Any) -> Answer:
        """Posts JSON; bytes go as they are."""
        return await self.send("POST", path, body)

    async def send(self, method: str, path: str, body: Any = None, token: str | None = "") -> Answer:
        """One exchange. `token` "" means the one given to this object, None sends none."""
        try:
            async with asyncio.timeout(self._deadline_s):
                async with self._request(method, path, body, token) as response:
                    return Answer(path, response.status, await response.text("utf-8", "replace"))
        except TimeoutError:
            raise DeadlineExceeded(f"the engine to answer {path}", self._deadline_s) from None
        except (aiohttp.ClientError, ConnectionError) as fault:
            raise _dead(path, fault) from fault

    @asynccontextmanager
    async def stream(self, path: str, body: Any) -> AsyncIterator[EventStream]:
        """Posts `body` and gives the open answer; leaving the block closes the connection."""
        try:
            async with self._request("POST", path, body, "") as response:
                yield EventStream(path, response, self._deadline_s)
                response.close()
        except aiohttp.ClientError as fault:
            raise _dead(path, fault) from fault

    def _request(self, method: str, path: str, body: Any, token: str | None) -> Any:
        session = self._session
        if session is None:
            session = self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None),
                trust_env=False,
            )
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = self._token if token == "" else token
        headers = {"Authorization": f"Bearer {sent}"} if sent else {}
        if data is not None:
            headers["Content-Type"] = "application/json"
        return session.request(
            method, self.address.url + path, data=data, headers=headers, allow_redirects=False
        )


def _dead(path: str, fault: Exception) -> EngineDead:
    return EngineDead("under test", path, "unknown", str(fault) or type(fault).__name__)
