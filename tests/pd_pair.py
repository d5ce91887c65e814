"""A PD pair of real engine processes, and what a router does: the same body to both, with a room of its own."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine_process import EngineProcess, serving

FLAGS = ("--max-total-tokens", "2048", "--max-running-requests", "8", "--max-step-tokens", "64")


@dataclass
class Pair:
    """`send` answers with two futures of (status, reply): prefill's and decode's."""

    prefill: EngineProcess
    decode: EngineProcess
    pool: ThreadPoolExecutor

    def body(self, ids: list[int], new: int = 8, rid: str | None = None, **params: Any) -> dict[str, Any]:
        row = {"max_new_tokens": new, "ignore_eos": True, "sampling_seed": 5} | params
        return {
            "input_ids": ids,
            "sampling_params": row,
            "return_logprob": True,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.prefill.ready["disaggregation_bootstrap_port"],
            "bootstrap_room": secrets.randbits(63),
        } | ({"rid": rid} if rid is not None else {})

    def send_to(self, side: EngineProcess, body: dict[str, Any]) -> Future[tuple[int, Any]]:
        return self.pool.submit(_call, side, body)

    def send(self, body: dict[str, Any]) -> tuple[Future[tuple[int, Any]], Future[tuple[int, Any]]]:
        return self.send_to(self.prefill, body), self.send_to(self.decode, body)

    def generate(self, ids: list[int], new: int = 8, **params: Any) -> tuple[int, Any]:
        """Decode's answer, as a router gives it; prefill's must be one token or an abort."""
        first, answer = self.send(self.body(ids, new, **params))
        status, row = first.result(60)
        assert status == 200 and len(row["output_ids"]) <= 1, row
        return answer.result(60)

    def idle(self, *sides: EngineProcess) -> None:
        """Waits until nothing runs, and checks that nothing is held or left."""
        for side in sides or (self.prefill, self.decode):
            side.wait_for(lambda load: load["num_total_reqs"] == 0, 30)
            assert side.load()["num_used_tokens"] == 0
            end = time.monotonic() + 30
            while info(side)["disaggregation"]["split_requests"]:
                assert time.monotonic() < end
                time.sleep(0.02)


def _call(side: EngineProcess, body: dict[str, Any]) -> tuple[int, Any]:
    try:
        return side.call("/generate", body)
    except OSError as fault:  # the process was killed under the call
        return 0, str(fault)


def info(side: EngineProcess) -> dict[str, Any]:
    status, row = side.call("/server_info")
    assert status == 200
    return row


def prompt_rows(side: EngineProcess) -> int:
    return info(side)["internal_states"][0]["prompt_rows"]


def start_half(model: Path, folder: Path, mode: str, *flags: str) -> EngineProcess:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("--engine-id", mode, "--disaggregation-mode", mode)
    return EngineProcess(model, folder, *FLAGS, *names, *flags)


@contextlib.contextmanager
def pair(model: Path, work: Path, *flags: str) -> Iterator[Pair]:
    halves = [start_half(model, work / mode, mode, *flags) for mode in ("prefill", "decode")]
    with serving(*halves) as [prefill, decode], ThreadPoolExecutor(32) as pool:
        yield Pair(prefill, decode, pool)
