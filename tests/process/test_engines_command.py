"""`turnout engines` on a run that works: from one engine to three and back to one, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

from tests.held_reward import VARIABLE
from tests.process.run_process import TINY, ended, gone_within, of_kind, start, wait_for

WORDS = ("--min-engines", "1", "--engine-threads", "1", "--trainer-threads", "1", "--no-plots",
         "--skip-eval-before-train", "--eval-num-prompts", "2", "--schedule", "async", "--num-rollout", "8",
         "--custom-rm-path", "tests.held_reward:held", "--reward-timeout-s", "200")  # fmt: skip


def engines(verb: str, run: Path, *words: str) -> tuple[int, str, str]:
    return ended(start("engines", verb, str(run), *words))


def test_from_one_engine_to_three_and_back(tmp_path: Path) -> None:
    run, go = tmp_path / "run", tmp_path / "go"
    process = start("train", str(TINY), "--run-dir", str(run), *WORDS, **{VARIABLE: str(go)})
    wait_for("a version of the run", lambda: of_kind(run, "VersionPublished"), process)
    status, out, err = engines("add", run, "--count", "2")
    assert status == 0 and "engine-1 serves v" in out and "engine-2 serves v" in out, (out, err)
    status, out, _ = engines("ls", run, "--json")
    rows = json.loads(out)["engines"]
    assert [(row["engine"], row["state"], row["program"]) for row in rows] == [
        (f"engine-{at}", "ready", "embedded") for at in range(3)
    ]
    assert len({row["version"] for row in rows}) == 1
    status, out, err = engines("remove", run, "engine-0", "engine-2")
    assert (status, out.strip()) == (0, "engine engine-0 has left; engine engine-2 has left"), err
    for name, why in (("engine-1", "stays: engines left: 0, needed: 1"), ("engine-9", "it has engine-1")):
        status, _, err = engines("remove", run, name)
        assert status == 3 and why in err, err
    go.touch()
    status, _, err = ended(process)
    assert status == 0, err
    assert gone_within(run, 5) == []
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["audit"]["failed"] == 0, summary["audit"]
    assert summary["groups"]["lost"] == 0
    assert [row["engine"] for row in of_kind(run, "EngineRemoved")] == ["engine-0", "engine-2"]
    last = of_kind(run, "VersionPublished")[-1]["version"]
    proved = {row["engine"] for row in of_kind(run, "VersionAttested") if row["version"] == last}
    assert proved == {"engine-1"}
    status, _, err = engines("ls", run, "--deadline", "5")
    assert status == 7 and "taken back" in err, err
