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

START_DEADLINE_S = 120.0


class EngineProcess:
    """One `python -m turnout.engine`. `call` returns (status, JSON or text)."""

    def __init__(self, model: Path, work: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        ready, self.log = work / "ready.json", work / "engine.log"
        command = [sys.executable, "-m", "turnout.engine", "--model-path", str(model)]
        command += ["--ready-file", str(ready), "--parent-pid", str(os.getpid()), *flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + START_DEADLINE_S
        while not ready.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        self.ready = json.loads(ready.read_text())
        self.url = self.ready["url"]

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


@contextlib.contextmanager
def engine(
    model: Path, work: Path, *flags: str, env: dict[str, str] | None = None
) -> Iterator[EngineProcess]:
    process = EngineProcess(model, work, *flags, env=env)
    try:
        yield process
    finally:
        if process.process.poll() is None:
            process.process.kill()
        process.process.wait(30)


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
