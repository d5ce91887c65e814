"""examples/regions.yaml with a real S3 server over HTTP, and two followers that reach it over 200 ms and 20 Mbit/s,
each with an engine of its own; one is away for five versions and more."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.engine_process import EngineProcess, serving
from tests.followed import FollowerProcess
from tests.held_reward import VARIABLE
from tests.object_store import environment, s3_server
from tests.process.run_process import ROOT, ended, of_kind, start, wait_for
from tests.throttled_proxy import ThrottledProxy
from turnout.train.model_zoo import resolve_checkpoint
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.digest import root_of

URL = "s3://weights/runs/regions"
WORDS = ("--rollout-slots", "4", "--num-rollout", "8", "--no-plots", "--skip-eval-before-train",
         "--eval-num-prompts", "2", "--engine-threads", "1", "--trainer-threads", "1", "--reward-timeout-s", "200",
         "--custom-rm-path", "tests.held_reward:held")  # fmt: skip


def fetched(follower: FollowerProcess) -> int:
    return sum(int(found[1]) for line in follower.lines if (found := re.search(r"read (\d+) bytes", line)))


def test_two_regions_come_to_the_same_weights_by_the_cheapest_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, go, model = tmp_path / "run", tmp_path / "go", resolve_checkpoint("tiny:llama")
    hosts = [tmp_path / "near", tmp_path / "away"]
    for host in hosts:
        shutil.copytree(model, host)
        (tmp_path / f"{host.name}-engine").mkdir()
    started = [
        EngineProcess(model, tmp_path / f"{host.name}-engine", "--allowed-root", str(tmp_path))
        for host in hosts
    ]
    followers: list[FollowerProcess] = []
    with serving(*started) as engines, s3_server() as endpoint:
        proxies = [ThrottledProxy(endpoint, 0.2, 20e6 / 8) for _ in hosts]

        def follow(at: int, *words: str) -> FollowerProcess:
            for name, value in environment(proxies[at].endpoint).items():
                monkeypatch.setenv(name, value)
            words = ("--engine", engines[at].url, *words)
            followers.append(FollowerProcess(URL, hosts[at], *words, deadline_s=150.0))
            return followers[-1]

        process = start("train", str(ROOT / "examples" / "regions.yaml"), "--run-dir", str(run), *WORDS,
                        **environment(endpoint), **{VARIABLE: str(go)})  # fmt: skip
        try:
            wait_for("two versions", lambda: len(of_kind(run, "VersionCommitted")) == 3, process)
            near, away = follow(0, "--until", "8"), follow(1)
            for follower in (near, away):
                follower.line("v000002-")
            away.process.send_signal(signal.SIGTERM)
            assert away.ended()[0] == 0
            go.touch()
            status, _, err = ended(process)
            assert status == 0, err
            back = follow(1, "--until", "8")
            assert (near.ended()[0], back.ended()[0]) == (0, 0), (near.lines, back.lines)
        finally:
            process.kill()
            for follower in followers:
                follower.kill()
            for proxy in proxies:
                proxy.close()
        published = of_kind(run, "VersionPublished")
        roots = {engine.call("/weight_version")[1]["root"] for engine in engines}
        assert roots | {root_of(read_checkpoint(host)) for host in hosts} == {published[-1]["root"]}
        assert {row["encoding"] for row in published} == {"packed"}, "deltas are the cheapest path"
        path = sum(row["bytes"] for row in published)
        assert fetched(near) <= 1.05 * path
        assert fetched(away) + fetched(back) <= 1.05 * path
