"""Runs whose engines somebody else started: other processes, real HTTP, none started or stopped by the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine_process import EngineProcess
from tests.process.run_process import TINY, ended, of_kind, start
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
