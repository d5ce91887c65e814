"""`turnout weights follow` beside a real SGLang: versions come as deltas, and each is proved by checksums."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.followed import FollowerProcess, bytes_of, bytes_read, stepped, tiny_publisher
from tests.published import bits_of
from tests.sglang.conftest import KEY, Server
from turnout.weights.checkpoint_io import read_checkpoint

DEADLINE_S = 300.0


def call(server: Server, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=DEADLINE_S) as reply:
        return json.loads(reply.read())


def answer(server: Server) -> list[float]:
    """Log-probs of the prompt's own tokens: they change with any weight."""
    body = {"input_ids": [1, 5, 9, 2, 7], "return_logprob": True, "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 2, "temperature": 0}}  # fmt: skip
    row = call(server, "/generate", body)
    return [pair[0] for pair in row["meta_info"]["output_token_logprobs"]]


def label(server: Server) -> str:
    return call(server, "/model_info")["weight_version"]


def test_versions_by_delta_beside_sglang(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOLLOWED_KEY", KEY)
    store, host = tmp_path / "weights", tmp_path / "host"
    publisher = tiny_publisher(store)
    words = ("--engine", server.url, "--engine-token-env", "FOLLOWED_KEY")
    follower = FollowerProcess(store, host, *words, deadline_s=DEADLINE_S)
    try:
        publisher.full()
        assert "level checksum" in follower.line(f"{publisher.version.label}  read")
        answers = [answer(server)]
        for seed in (2, 3, 4):
            version = publisher.delta(stepped(publisher.now, seed, share=0.5), "ranked")
            line = follower.line(f"{version.label}  read")
            assert "level checksum" in line
            assert bytes_read(line) == bytes_of(store, version.directory) < bytes_of(store, "weight_v000001")
            assert label(server) == version.label
            answers.append(answer(server))
        assert len({tuple(row) for row in answers}) == 4
        assert bits_of(list(read_checkpoint(host))) == bits_of(publisher.now)

        follower.process.send_signal(signal.SIGSTOP)  # it sees the next version with its damage only
        held = publisher.version
        version = publisher.delta(stepped(publisher.now, 5))
        file = min((store / version.directory).glob("delta-*"))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 16
        file.write_bytes(data)
        follower.process.send_signal(signal.SIGCONT)
        assert "the bytes are not those that were written" in follower.line(f"{held.label} stays")
        assert (label(server), answer(server)) == (held.label, answers[-1])

        version = publisher.full(stepped(publisher.now, 6, share=0.5))  # leads around the damaged one
        assert "level checksum" in follower.line(f"{version.label}  read")
        assert (label(server), answer(server) in answers) == (version.label, False)
        follower.process.send_signal(signal.SIGTERM)
        assert follower.ended()[0] == 0
    finally:
        follower.kill()
