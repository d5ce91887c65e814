"""Runs whose engines somebody else started: other processes, real HTTP, none started or stopped by the run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engine_process import EngineProcess
from tests.held_reward import VARIABLE
from tests.process.run_process import ROOT, TINY, ended, environment, of_kind, start, wait_for
from tests.throttled_proxy import ThrottledProxy
from turnout.train.model_zoo import resolve_checkpoint

SHORT = ("--no-plots", "--skip-eval-before-train", "--eval-num-prompts", "2", "--trainer-threads", "1")
Start = Callable[..., EngineProcess]


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[Start]:
    """Starts an engine as somebody else would; all are gone after the test, none before."""
    started: list[EngineProcess] = []

    def start_one(*flags: str, model: Path | None = None, **env: str) -> EngineProcess:
        work = tmp_path / f"e{len(started)}"
        work.mkdir()
        given = model if model is not None else resolve_checkpoint("tiny:llama")
        started.append(EngineProcess(given, work, "--allowed-root", str(tmp_path), *flags, env=env))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()


def train(run: Path, *words: str, **env: str) -> tuple[int, str, str]:
    return ended(start("train", str(TINY), "--run-dir", str(run), *SHORT, *words, **env))


def place(engine: EngineProcess) -> str:
    return engine.url.removeprefix("http://")


def whole(run: Path, result: tuple[int, str, str]) -> dict:
    status, _, err = result
    assert status == 0, err
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["audit"]["failed"] == 0, summary["audit"]
    assert summary["groups"]["lost"] == 0
    return summary


def attested(run: Path) -> dict[str, set[str]]:
    """Engines by the version that they proved, for each committed one."""
    rows = of_kind(run, "VersionAttested")
    return {
        version: {row["engine"] for row in rows if row["version"] == version}
        for version in (row["version"] for row in of_kind(run, "VersionCommitted"))
    }


def test_a_run_on_two_engines_of_somebody_else_and_on_again(tmp_path: Path, start_engine: Start) -> None:
    """Updates go to both; both are left as they are, and a run that is resumed finds them at a later version."""
    engines = [start_engine().serving() for _ in range(2)]
    names = {place(engine) for engine in engines}
    run = tmp_path / "run"
    proxy = {"http_proxy": "http://127.0.0.1:9", "all_proxy": "http://127.0.0.1:9"}
    words = (
        "--rollout-external-engine-addrs",
        *(f"http://{name}/" for name in names),
        "--save-interval",
        "1",
    )
    whole(run, train(run, *words, "--num-rollout", "2", **proxy))
    assert list(attested(run).values()) == [names] * 3
    assert {row["engine"]: row["pid"] for row in of_kind(run, "EngineReady")} == dict.fromkeys(names)
    assert all(engine.process.poll() is None for engine in engines)
    whole(run, train(run, *words, "--num-rollout", "3"))
    assert all(engine.call("/weight_version")[1]["version"].startswith("v") for engine in engines)


def test_a_run_goes_on_while_the_network_is_split_and_the_engine_beyond_joins_after_it(
    tmp_path: Path, start_engine: Start
) -> None:
    """No connection ends: what is in flight to the engine beyond is missed by the probes alone."""
    near, far = (start_engine("--threads", "1").serving() for _ in range(2))
    network = ThrottledProxy(far.url)
    run, beyond = tmp_path / "run", network.endpoint.removeprefix("http://")
    words = (
        "--rollout-external-engine-addrs",
        place(near),
        beyond,
        "--use-fault-tolerance",
        "--min-engines",
        "1",
    )
    probes = ("--rollout-health-check-interval", "0.3", "--rollout-health-check-timeout", "1")
    long = ("--rollout-max-response-len", "96", "--rollout-min-response-len", "96", "--num-rollout", "100000")
    process = start(
        "train", str(TINY), "--run-dir", str(run), "--schedule", "async", *SHORT, *words, *probes, *long
    )

    def steps() -> int:
        return len(of_kind(run, "StepTrained"))

    wait_for("two steps", lambda: steps() >= 2, process)
    network.split()
    wait_for("the loss", lambda: beyond in {row["engine"] for row in of_kind(run, "EngineLost")}, process)
    before = steps()
    wait_for("steps without it", lambda: steps() >= before + 3, process)
    assert not [row for row in of_kind(run, "VersionAttested")[-2:] if row["engine"] == beyond]
    at = len(of_kind(run, "VersionAttested"))
    network.heal()
    proofs = lambda: [row for row in of_kind(run, "VersionAttested")[at:] if row["engine"] == beyond]  # noqa: E731
    wait_for("its proof of a version", proofs, process)
    before = steps()
    wait_for("a step with it", lambda: steps() > before, process)
    process.send_signal(signal.SIGTERM)
    status, _, err = ended(process)
    network.close()
    summary = json.loads((run / "summary.json").read_text())
    assert status == 143 and summary["status"] == "interrupted", err
    assert summary["audit"]["failed"] == 0 and summary["groups"]["lost"] == 0, summary


def asked(name: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://{name}/server_info", timeout=30) as reply:
        return json.loads(reply.read())


def free_ports(count: int) -> list[str]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def test_the_example_with_a_late_engine_that_ends_and_comes_again(
    tmp_path: Path, start_engine: Start
) -> None:
    """examples/external/, by deltas: the run begins with one engine; the late one joins; the first is killed and
    another process serves at its address, which joins as well."""
    run, go, root, ports = tmp_path / "run", tmp_path / "go", tmp_path / "weights", free_ports(2)
    names = [f"127.0.0.1:{port}" for port in ports]
    script = ROOT / "examples" / "external"
    words = ("--ports", *ports, "--root", str(root), "--late", "12")
    others = subprocess.Popen(
        [sys.executable, str(script / "engines.py"), *words],
        cwd=ROOT,
        env=environment(),
        start_new_session=True,
    )
    try:
        process = start(
            "train", str(script / "run.yaml"), "--run-dir", str(run), *SHORT, "--num-rollout", "8",
            "--rollout-external-engine-addrs", *names, "--update-weight-disk-dir", str(root),
            "--custom-rm-path", "tests.held_reward:held", "--reward-timeout-s", "200",
            "--rollout-health-check-interval", "0.3", "--rollout-health-check-timeout", "2",
            **{VARIABLE: str(go)},
        )  # fmt: skip

        def lives(name: str) -> int:
            return len([row for row in of_kind(run, "VersionAttested") if row["engine"] == name])

        wait_for("the late engine to join", lambda: lives(names[1]), process)
        pid = int(asked(names[0])["pid"])
        os.kill(pid, signal.SIGKILL)
        wait_for("the engine's death", lambda: of_kind(run, "EngineLost"), process)
        start_engine("--port", ports[0])
        wait_for("its next life", lambda: len(of_kind(run, "EngineReady")) == 3, process)
        before = lives(names[0])
        wait_for("it to prove a version", lambda: lives(names[0]) > before or lives(names[0]) > 1, process)
        go.touch()
        whole(run, ended(process))
        last = of_kind(run, "VersionCommitted")[-1]["version"]
        assert attested(run)[last] == set(names)
    finally:
        others.send_signal(signal.SIGTERM)
        others.wait(30)


def test_updates_by_group(tmp_path: Path, start_engine: Start) -> None:
    """Killed, and gone on with: the engine leaves the group of the controller that is gone."""
    engine = start_engine().serving()
    run, go, name = tmp_path / "run", tmp_path / "go", place(engine)
    words = ("--num-rollout", "3", "--update-weight-transport", "group", "--save-interval", "1",
             "--rollout-external-engine-addrs", name, "--reward-timeout-s", "200",
             "--custom-rm-path", "tests.held_reward:held")  # fmt: skip
    groups = partial(engine.call, "/destroy_weights_update_group", {"group_name": "none"})
    process = start("train", str(TINY), "--run-dir", str(run), *SHORT, *words, **{VARIABLE: str(go)})
    wait_for("a checkpoint", (run / "checkpoints" / "step_000002" / "state.json").is_file, process)
    process.kill()
    process.communicate()
    assert "it is in ['" in groups()[1]["message"], "the killed one left its group there"
    go.touch()
    whole(run, train(run, *words, **{VARIABLE: str(go)}))
    proofs = list(attested(run).values())
    assert proofs and proofs == [{name}] * len(proofs)
    status, row = groups()
    assert status == 400 and row["message"].endswith("it is in []"), "an engine can be in 8 groups at most"


def test_the_file_of_addresses_is_followed(tmp_path: Path, start_engine: Start) -> None:
    """From one engine to two, and to the other one alone."""
    run, go, file = tmp_path / "run", tmp_path / "go", tmp_path / "engines.txt"
    first, second = (place(engine.serving()) for engine in [start_engine(), start_engine()])
    file.write_text(f"{first}  # the only one\n")
    process = start(
        "train", str(TINY), "--run-dir", str(run), *SHORT, "--num-rollout", "8", "--schedule", "async",
        "--rollout-external-engine-file", str(file),
        "--custom-rm-path", "tests.held_reward:held", "--reward-timeout-s", "200", **{VARIABLE: str(go)},
    )  # fmt: skip
    wait_for("a version of the run", lambda: of_kind(run, "VersionPublished"), process)
    file.write_text(f"{first}\n{second}\n")
    rows = partial(of_kind, run, "VersionAttested")
    wait_for("the second engine", lambda: any(row["engine"] == second for row in rows()), process)
    asked = start("engines", "remove", str(run), second)
    status, said, told = ended(asked)
    assert status == 3 and f"names {second}: take it out there" in said + told
    status, _, told = train(
        tmp_path / "other", "--rollout-external-engine-addrs", second, "--engine-start-timeout-s", "5"
    )
    assert status == 2 and "it works for run" in told and "end the other run" in told, "one run at a time"
    file.write_text(f"{second}\n")
    wait_for("the first to leave", lambda: of_kind(run, "EngineRemoved"), process)
    go.touch()
    whole(run, ended(process))
    assert [row["engine"] for row in of_kind(run, "EngineRemoved")] == [first]
    assert attested(run)[of_kind(run, "VersionCommitted")[-1]["version"]] == {second}
