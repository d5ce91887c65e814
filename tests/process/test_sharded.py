"""`turnout train examples/sharded.yaml`: four trainer processes, one of them stopped, then killed, in a step."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.held_reward import VARIABLE
from tests.process.run_process import ROOT, ended, events, gone_within, of_kind, ranks_of, start, wait_for
from turnout.placement.shared_memory import FOLDER

REWARD = "tests/held_reward.py:held"
RANK = 1


def test_a_run_of_four_ranks_outlives_a_rank_that_is_killed_in_a_step(tmp_path: Path) -> None:
    folder, go = tmp_path / "run", tmp_path / "go"
    words = (
        "--run-dir",
        str(folder),
        "--custom-rm-path",
        REWARD,
        "--save-interval",
        "1",
        "--use-fault-tolerance",
    )
    more = ("--engine-threads", "1", "--panel", "off", "--no-plots", "--no-tensorboard", "--async-save")
    run = start("train", str(ROOT / "examples" / "sharded.yaml"), *words, *more, **{VARIABLE: str(go)})
    wait_for("the second checkpoint", (folder / "checkpoints" / "step_000002").exists, run)
    ranks = ranks_of(folder)
    assert sorted(ranks) == [0, 1, 2, 3]
    os.kill(ranks[RANK], signal.SIGSTOP)
    go.touch()

    def told() -> str:
        line = json.loads((folder / "waits.json").read_text())["line"]
        return line if f"trainer rank {RANK} (cpu:{RANK})" in line and "SIGSTOP" in line else ""

    chain = wait_for("the rank to be named", told, run)
    assert "train -> trainer" in chain
    os.kill(ranks[RANK], signal.SIGKILL)
    status, out, err = ended(run)  # the others end with it
    assert status == 0, err[-3000:]

    (failed,) = [row for row in of_kind(folder, "RunEnded") if row["status"] == "failed"]
    assert (
        f"process {ranks[RANK]} of trainer rank {RANK} (cpu:{RANK}) ended: killed by SIGKILL"
        in failed["reason"]
    )
    assert "in phase 'train'" in failed["reason"] and failed["reason"] in out
    begun = [row["resumed_at"] for row in of_kind(folder, "RunStarted")]
    assert begun == [None, 2], "the run goes on from its last checkpoint"
    first, second = of_kind(folder, "EngineReady")
    assert first["pid"] == second["pid"], "the engine is the same process"
    check_end(folder, run.pid)


def check_end(folder: Path, controller: int) -> None:
    """Every version was attested by its root, all rules hold, and nothing is left."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["audit"]["failed"] == 0, summary["audit"]
    assert summary["ranks"] == {"count": 4, "tensor_parallel": 2, "expert_parallel": 1}
    roots = {row["version"]: row["root"] for row in events(folder) if row["event"] == "VersionPublished"}
    committed = [row["version"] for row in of_kind(folder, "VersionCommitted")]
    assert len(roots) >= 4 and committed[-1] in roots
    assert gone_within(folder, 5) == []
    assert list(FOLDER.glob(f"turnout_{controller}_*")) == [], "no shared memory of the run is left"
