"""examples/regions.yaml with a real S3 server over HTTP, and two regions that reach it over 200 ms and 20 Mbit/s,
each with a follower and an engine that the run samples from; one follower is away for five versions."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.engine_process import EngineProcess, serving
from tests.followed import FollowerProcess
from tests.held_reward import VARIABLE
from tests.object_store import environment, s3_server
from tests.process.run_process import ROOT, ended, events, of_kind, start, wait_for
from tests.throttled_proxy import ThrottledProxy
from turnout.rollout.ledger_read import LedgerReader
from turnout.train.model_zoo import resolve_checkpoint
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.digest import root_of

URL = "s3://weights/runs/regions"
STEPS, AWAY, LAG = 9, 5, 3
WORDS = ("--num-rollout", str(STEPS), "--no-plots", "--skip-eval-before-train", "--eval-num-prompts", "2",
         "--trainer-threads", "1", "--reward-timeout-s", "200",
         "--custom-rm-path", "tests.held_reward:held")  # fmt: skip


def fetched(*followers: FollowerProcess) -> int:
    lines = [line for follower in followers for line in follower.lines]
    return sum(int(found[1]) for line in lines if (found := re.search(r"read (\d+) bytes", line)))


def counter(label: str) -> int:
    return int(label[1:7])


def made(run: Path) -> Counter[tuple[str, int, int]]:
    """Tokens that trained, by engine, version and the train steps that were done by then."""
    found = Counter[tuple[str, int, int]]()
    ledger = LedgerReader.of(run / "ledger.sqlite")
    for row in of_kind(run, "GroupTrained"):
        for piece in ledger.pieces(row["group"]):
            [(tokens, engine)] = piece["engines"] or [(0, "")]
            for count, label in piece["versions"] if tokens else ():
                found[engine, counter(label), row["step"]] += count
    ledger.close()
    return found


def attested(run: Path, engine: str) -> list[int]:
    rows = of_kind(run, "VersionAttested")
    return [counter(row["version"]) for row in rows if row["engine"] == engine]


def committed(run: Path) -> int:
    return max((counter(row["version"]) for row in of_kind(run, "VersionCommitted")), default=-1)


def test_two_regions_are_sampled_from_and_come_to_the_same_weights_by_the_cheapest_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, go, model = tmp_path / "run", tmp_path / "go", resolve_checkpoint("tiny:llama")
    go.touch()
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
        names = [engine.url.removeprefix("http://") for engine in engines]
        proxies = [ThrottledProxy(endpoint, 0.2, 20e6 / 8) for _ in hosts]

        def follow(at: int, *words: str) -> FollowerProcess:
            for name, value in environment(proxies[at].endpoint).items():
                monkeypatch.setenv(name, value)
            words = ("--engine", engines[at].url, *words)
            followers.append(FollowerProcess(URL, hosts[at], *words, deadline_s=150.0))
            return followers[-1]

        process = start("train", str(ROOT / "examples" / "regions.yaml"), "--run-dir", str(run), *WORDS,
                        "--rollout-external-engine-addrs", *names,
                        **environment(endpoint), **{VARIABLE: str(go)})  # fmt: skip
        try:
            wait_for("the run", (run / "events.jsonl").exists, process)
            near, away = follow(0, "--until", str(STEPS)), follow(1)
            wait_for("both", lambda: all(max(attested(run, name), default=0) > 0 for name in names), process)
            away.process.send_signal(signal.SIGTERM)
            assert away.ended()[0] == 0
            last = max(attested(run, names[1]))
            wait_for("versions without it", lambda: committed(run) >= last + AWAY, process)
            go.unlink()  # the run holds its breath
            back = follow(1, "--until", str(STEPS))
            wait_for("it back", lambda: max(attested(run, names[1])) >= last + AWAY, process)
            go.touch()
            status, _, err = ended(process)
            assert status == 0, err
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
        assert fetched(away, back) <= 1.05 * path
        sampled(run, names, last)


def sampled(run: Path, names: list[str], last: int) -> None:
    """Both engines made tokens that trained, the second also of versions behind the current one, and, when it was
    back, of later ones; none of them is older than the bound, and nothing was fenced or lost on the way."""
    by_engine = made(run)
    assert {engine for engine, _, _ in by_engine} == set(names)
    second = {(version, step) for engine, version, step in by_engine if engine == names[1]}
    assert any(version <= last and step > version for version, step in second), "while it was behind"
    assert any(version >= last + AWAY for version, _ in second), "when it was back"
    assert max(step - version for _, version, step in by_engine) <= LAG
    assert all(version >= last + AWAY or step <= last + LAG for version, step in second)
    told = json.loads((run / "summary.json").read_text())
    lags: dict[str, Any] = told["lag"]
    assert told["status"] == "finished" and not told["audit"]["failed"], told["audit"]
    assert 0 < lags["max"] <= LAG and told["evicted"] == 0 and told["groups"]["lost"] == 0
    assert not [
        row for row in events(run) if row["event"] in ("EngineFenced", "EngineLost", "VersionAborted")
    ]
