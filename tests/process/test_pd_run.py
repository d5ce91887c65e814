"""`turnout train` with PD pairs: real prefill and decode engines, updated in one commit, killed, started again."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

from tests.held_reward import VARIABLE
from tests.process.run_process import ROOT, ended, events, gone_within, of_kind, start, train, wait_for
from tests.process.test_router import installed

PREFILL, DECODE = "actor.prefill1-0", "actor.decode2-0"


def engines_of(run: Path) -> list[list[tuple[int, str]]]:
    """For each trajectory, how many tokens in a row which engine made."""
    with sqlite3.connect(run / "ledger.sqlite") as ledger:
        rows = ledger.execute("select engines from trajectories order by group_id, member, start").fetchall()
    return [[(count, name) for count, name in json.loads(row[0])] for row in rows]


def groups_file(folder: Path, prefill: int, decode: int) -> Path:
    groups = [{"worker_type": kind, "num_gpus": n} for kind, n in (("prefill", prefill), ("decode", decode))]
    path = folder / "engines.json"
    path.write_text(json.dumps({"sglang": [{"name": "actor", "server_groups": groups}]}))
    return path


def summary_of(run: Path) -> dict[str, Any]:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["audit"]["failed"] == 0, summary["audit"]
    assert summary["groups"]["lost"] == 0
    return summary


def test_a_run_on_a_pair_is_that_of_one_engine_bit_for_bit(tmp_path: Path) -> None:
    """The first token of each response is the prefill engine's, the rest the decode engine's; what is trained is
    what one engine that does both would have made."""
    words = (
        "--num-rollout",
        "2",
        "--no-plots",
        "--skip-eval-before-train",
        "--deterministic",
        "--trainer-threads",
        "1",
    )
    halves = ("--sglang-config", str(groups_file(tmp_path, 1, 1)))
    runs: dict[str, tuple[str, ...]] = {"pair": halves, "whole": ()}
    if installed("smg"):
        runs["routed"] = (*halves, "--router", "smg")
    digests: list[str] = []
    for name, more in runs.items():
        status, _, err = train(tmp_path / name, *words, *more)
        assert status == 0, err
        summary_of(tmp_path / name)
        digests.append(of_kind(tmp_path / name, "VersionPublished")[-1]["root"])
    assert len(set(digests)) == 1
    for name, first in (
        ("pair", PREFILL),
        ("routed", "router"),
    ):  # a router does not say who computed the prompt
        for made in engines_of(tmp_path / name) if name in runs else ():
            assert [engine for _, engine in made] in ([first, DECODE], [first]) and made[0][0] == 1
    last = of_kind(tmp_path / "pair", "VersionPublished")[-1]["version"]
    proved = {
        row["engine"] for row in of_kind(tmp_path / "pair", "VersionAttested") if row["version"] == last
    }
    assert proved == {PREFILL, DECODE}


def pid(run: Path, engine: str) -> int:
    """Of its newest life."""
    return [row["pid"] for row in of_kind(run, "EngineReady") if row["engine"] == engine][-1]


def kill(run: Path, engine: str, stopped_s: float = 0.0) -> None:
    """SIGKILL, after it stood still for so long: then others wait for it."""
    if stopped_s:
        os.kill(pid(run, engine), signal.SIGSTOP)
        time.sleep(stopped_s)
    os.kill(pid(run, engine), signal.SIGKILL)


def joined_again(run: Path, engine: str) -> bool:
    """Whether it has attested a version in a second life."""
    told = [row["event"] for row in events(run) if row.get("engine") == engine]
    lives = [at for at, event in enumerate(told) if event == "EngineReady"]
    return len(lives) == 2 and "VersionAttested" in told[lives[1] :]


def test_the_example_goes_on_though_engines_of_both_halves_are_killed(tmp_path: Path) -> None:
    """examples/pd.yaml: a prefill engine with requests in its queue, a decode engine while a version is put into
    place, and, once these are back, the other two."""
    run, go = tmp_path / "run", tmp_path / "go"
    words = ("--custom-rm-path", "tests.held_reward:held", "--reward-timeout-s", "150", "--num-rollout", "10")
    limits = ("--no-plots", "--rollout-health-check-interval", "0.3", "--rollout-health-check-timeout", "2")
    example = str(ROOT / "examples/pd.yaml")
    process = start("train", example, "--run-dir", str(run), *words, *limits, **{VARIABLE: str(go)})
    wait_for("a version of the run", lambda: of_kind(run, "VersionPublished"), process)
    kill(run, "actor.prefill1-0", stopped_s=0.3)
    published = len(of_kind(run, "VersionPublished"))
    wait_for("the next version", lambda: len(of_kind(run, "VersionPublished")) > published, process)
    kill(run, "actor.decode2-0")
    both = ("actor.prefill1-0", "actor.decode2-0")
    wait_for("both to be back", lambda: all(joined_again(run, name) for name in both), process)
    go.touch()
    kill(run, "actor.prefill1-1")
    kill(run, "actor.decode2-1", stopped_s=0.3)
    status, _, err = ended(process)
    assert status == 0, err
    assert gone_within(run, 5) == []
    summary = summary_of(run)
    assert summary["steps"] == 10 and summary["groups"]["trained"] == 40
    assert {row["engine"] for row in of_kind(run, "EngineLost")} >= {
        *both,
        "actor.prefill1-1",
        "actor.decode2-1",
    }
    assert 0 < summary["later_turns_cache_hit"] < 1
    for runs in engines_of(run):
        names = [name for _, name in runs]
        after = [b for a, b in zip(["environment", *names], names) if a == "environment"]
        assert all("prefill" in name for name in after), "each turn begins on a prefill engine"
