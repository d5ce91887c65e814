"""A real engine process for tests, and plain HTTP calls to it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

START_DEADLINE_S = 180.0


class EngineProcess:
    """One `python -m turnout.engine`, usable once `serving` returned. `call` returns (status, JSON or text)."""

    def __init__(
        self,
        model: Path,
        work: Path,
        *flags: str,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self._ready, self.log = work / "ready.json", work / "engine.log"
        command = [sys.executable, "-m", "turnout.engine", "--model-path", str(model)]
        command += ["--ready-file", str(self._ready), "--parent-pid", str(os.getpid()), *flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=cwd)

    def serving(self) -> EngineProcess:
        """Waits until it serves; `ready` and `url` are there then."""
        deadline = time.monotonic() + START_DEADLINE_S
        while not self._ready.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        self.ready: dict[str, Any] = json.loads(self._ready.read_text())
        self.url: str = self.ready["url"]
        return self

    def call(
        self, path: str, body: Any = None, token: str | None = None, method: str | None = None
    ) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as reply:
                return reply.status, _parsed(reply.read())
        except urllib.error.HTTPError as fault:
            with fault:
                return fault.code, _parsed(fault.read())

    def generate(
        self, ids: list[int], new: int = 8, rid: str | None = None, **params: Any
    ) -> tuple[int, Any]:
        row = {"max_new_tokens": new, "ignore_eos": True, "sampling_seed": 5} | params
        body = {"input_ids": ids, "sampling_params": row, "return_logprob": True}
        return self.call("/generate", body | ({"rid": rid} if rid is not None else {}))

    def load(self) -> dict[str, int]:
        status, row = self.call("/v1/loads")
        assert status == 200
        return row["loads"][0]

    def wait_for(self, done: Any, deadline_s: float = 30.0) -> None:
        """Polls the load report until `done(load)`."""
        deadline = time.monotonic() + deadline_s
        while not done(self.load()):
            assert time.monotonic() < deadline, self.load()
            time.sleep(0.01)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(30)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)


@contextlib.contextmanager
def serving(*started: EngineProcess) -> Iterator[list[EngineProcess]]:
    """Engines that were started side by side (a start is mostly imports, on one core); none is left."""
    try:
        yield [process.serving() for process in started]
    finally:
        for process in started:
            process.kill()


@contextlib.contextmanager
def engine(
    model: Path, work: Path, *flags: str, env: dict[str, str] | None = None
) -> Iterator[EngineProcess]:
    with serving(EngineProcess(model, work, *flags, env=env)) as [process]:
        yield process


def two_engines(model: Path, folders: pytest.TempPathFactory, *flags: str) -> Iterator[list[EngineProcess]]:
    """The body of a fixture: two alike, which may read all that the session's tests write."""
    allowed = ("--allowed-root", str(folders.getbasetemp()))
    with serving(
        *(EngineProcess(model, folders.mktemp(name), *flags, *allowed) for name in ("e0", "e1"))
    ) as pair:
        yield pair


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body) if body else ""
    except ValueError:
        return body.decode()


def parts(reply: tuple[int, Any]) -> tuple[list[int], list[float]]:
    """Tokens and log-probs of a good reply, checked to be of one length."""
    status, row = reply
    assert status == 200, row
    meta = row["meta_info"]
    pairs = meta["output_token_logprobs"]
    assert [p[1] for p in pairs] == row["output_ids"]
    assert (
        meta["completion_tokens"] == len(pairs) == sum(v["end"] - v["start"] for v in meta["weight_versions"])
    )
    return row["output_ids"], [p[0] for p in pairs]
