"""`turnout weights follow` as a process without torch, beside a real engine."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine_process import EngineProcess
from tests.engine_process import engine as engine_of
from tests.followed import FollowerProcess, bytes_of, bytes_read, serves, stepped, tiny, tiny_publisher
from tests.follower_kills import RealKills
from tests.process.run_process import of_kind, train
from tests.published import Publisher, bits_of
from turnout.transfer.follower import LOAD
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.digest import root_of
from turnout.weights.local_checkpoint import JOURNAL_FSYNC, OVERWRITE


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with engine_of(tiny()[0], tmp_path_factory.mktemp("engine")) as running:
        yield running


def published(publisher: Publisher, seed: int, encoding: str = "packed") -> str:
    return publisher.delta(stepped(publisher.now, seed), encoding).label


def test_a_follower_keeps_its_engine_at_the_newest_version(engine: EngineProcess, tmp_path: Path) -> None:
    store, host = tmp_path / "weights", tmp_path / "host"
    publisher = tiny_publisher(store)
    follower = FollowerProcess(store, host, "--engine", engine.url)
    try:
        publisher.full()
        assert "level memory" in follower.line(publisher.version.label)
        answers = [engine.generate([1, 2, 3])]
        for seed, encoding in ((2, "indices"), (3, "ranked"), (4, "deltas_zstd")):
            line = follower.line(published(publisher, seed, encoding))
            assert serves(engine, publisher.version)
            assert bytes_read(line) == bytes_of(store, publisher.version.directory)
            assert all(f"{phase} 0." in line for phase in ("fetch", "overwrite", "engine load", "attest"))
            answers.append(engine.generate([1, 2, 3]))
        assert [status for status, _ in answers] == [200] * 4
        names = [row["meta_info"]["weight_version"] for _, row in answers]
        assert [name[:7] for name in names] == [f"v00000{n}" for n in (1, 2, 3, 4)]
        assert bits_of(list(read_checkpoint(host))) == bits_of(publisher.now)
        position = json.loads((store / "followers" / "host.json").read_text())
        assert (position["label"], position["level"]) == (publisher.version.label, "memory")
        follower.process.send_signal(signal.SIGTERM)
        assert follower.ended()[0] == 0
    finally:
        follower.kill()


def test_offline_for_five_versions_then_only_the_newest(engine: EngineProcess, tmp_path: Path) -> None:
    """The engine loads once; a joiner with nothing, and one with the model that the run began from, read what the
    cheapest route has."""
    store, host = tmp_path / "weights", tmp_path / "host"
    publisher = tiny_publisher(store)
    publisher.full()
    status, _, err = FollowerProcess(store, host, "--engine", engine.url, "--once").ended()
    assert status == 0, err
    for seed in range(2, 7):
        published(publisher, seed)
    chain = [f"weight_v00000{n}" for n in range(2, 7)]
    status, lines, err = FollowerProcess(store, host, "--engine", engine.url, "--until", "6").ended()
    assert status == 0 and len(lines) == 1, err
    assert bytes_read(lines[0]) == bytes_of(store, *chain)
    assert serves(engine, publisher.version)
    status, lines, err = FollowerProcess(store, tmp_path / "late", "--engine", engine.url, "--once").ended()
    assert status == 0, err
    assert bytes_read(lines[0]) <= 1.05 * bytes_of(store, "weight_v000001", *chain)
    assert bits_of(list(read_checkpoint(tmp_path / "late"))) == bits_of(publisher.now)


def test_killed_three_times(engine: EngineProcess, tmp_path: Path) -> None:
    world = RealKills(engine, tmp_path, 5)
    try:
        for phase in (JOURNAL_FSYNC, OVERWRITE, LOAD):
            world.kill_in(phase)
    finally:
        world.follower.kill()
    assert world.table.total() == 3


def test_beside_a_run_of_turnout_train(engine: EngineProcess, tmp_path: Path) -> None:
    """The follower waits for the store to appear, and ends where the run's own engine does."""
    run, host = tmp_path / "run", tmp_path / "host"
    follower = FollowerProcess(run / "weights", host, "--engine", engine.url)
    try:
        words = (
            "--update-weight-mode",
            "delta",
            "--num-rollout",
            "3",
            "--no-plots",
            "--eval-num-prompts",
            "2",
        )
        status, _, err = train(run, *words, "--update-weight-disk-keep-files")
        assert status == 0, err
        committed, published = of_kind(run, "VersionCommitted"), of_kind(run, "VersionPublished")
        newest = committed[-1]["version"]
        assert len(published) == 3 and newest.startswith("v000003")
        follower.line(f"{newest}  read")
        assert follower.lines[0].startswith("nothing stays: ")
        _, served = engine.call("/weight_version")
        assert (served["version"], served["root"], served["level"]) == (
            newest,
            published[-1]["root"],
            "memory",
        )
        assert root_of(read_checkpoint(host)) == published[-1]["root"]
        follower.process.send_signal(signal.SIGTERM)
        assert follower.ended()[0] == 0
    finally:
        follower.kill()


def test_a_version_that_never_comes_has_a_deadline(tmp_path: Path) -> None:
    publisher = tiny_publisher(tmp_path / "weights")
    publisher.full()
    words = ("--until", "v000009-0123456789abcdef", "--deadline", "1")
    status, _, err = FollowerProcess(tmp_path / "weights", tmp_path / "host", *words).ended()
    assert status == 7 and "Traceback" not in err


def test_an_engine_that_is_not_there_is_told(tmp_path: Path) -> None:
    publisher = tiny_publisher(tmp_path / "weights")
    publisher.full()
    words = ("--engine", "http://127.0.0.1:9", "--once", "--engine-deadline", "2")
    status, lines, err = FollowerProcess(tmp_path / "weights", tmp_path / "host", *words).ended()
    assert status == 4 and "Traceback" not in err, err
    assert len(lines) == 1 and "stays" in lines[0]
