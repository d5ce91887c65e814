"""`turnout train` with PD pairs: real prefill and decode engines, updated in one commit."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from tests.process.run_process import of_kind, train

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
    digests: list[str] = []
    for name, more in (("pair", halves), ("whole", ())):
        status, _, err = train(tmp_path / name, *words, *more)
        assert status == 0, err
        summary_of(tmp_path / name)
        digests.append(of_kind(tmp_path / name, "VersionPublished")[-1]["root"])
    assert digests[0] == digests[1]
    for runs in engines_of(tmp_path / "pair"):
        assert [name for _, name in runs] in ([PREFILL, DECODE], [PREFILL]) and runs[0][0] == 1
    last = of_kind(tmp_path / "pair", "VersionPublished")[-1]["version"]
    proved = {
        row["engine"] for row in of_kind(tmp_path / "pair", "VersionAttested") if row["version"] == last
    }
    assert proved == {PREFILL, DECODE}
