"""`turnout train examples/trouble.yaml`: a stale group, a killed engine and a stalled tool in a run that ends well,
each explained by `doctor` (while it stands and afterwards), by `inspect` and by the events."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

from tests.process.run_process import ROOT, ended, of_kind, start, wait_for, whole
from turnout.cli.main import main

TOOL = "trouble.py"
PATIENT = f"{ROOT}/tests/process/patient_reward.py:reward"


def told(*words: str) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = main(list(words))
    return status, out.getvalue()


def stalled(run: Path) -> bool:
    """Whether waits.json tells that the reward stands still."""
    path = run / "waits.json"
    row = json.loads(path.read_text()) if path.exists() else {}
    return bool(row.get("stalled")) and row["chain"][-1]["on"].startswith("reward")


def stall_told(run: Path) -> str:
    """What doctor says while the tool stalls; it is asked only then."""
    status, text = told("doctor", str(run)) if stalled(run) else (0, "")
    return text if status == 3 and "share_of_digits_tool" in text.split("\n")[0] else ""


def test_all_three_are_told_while_they_are_there_and_afterwards(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("--custom-rm-path", PATIENT, "--stall-warning-s", "3", "--run-dir", str(run), "--no-plots")
    process = start("train", str(ROOT / "examples" / "trouble.yaml"), *words, TROUBLE_RUN=str(run))
    wait_for("waits.json", (run / "waits.json").exists, process)
    told("doctor", str(run))  # what it imports is loaded now: the stall has a deadline
    text = wait_for("the tool's stall as doctor tells it", lambda: stall_told(run), process)
    line = text.split("\n")[0]
    assert line.startswith("run -> rollout -> group g") and f"{TOOL}:" in line, line
    assert "engine-1 was lost in phase " in text and "killed by SIGKILL" in text
    status, _, err = ended(process)
    whole(run, status, err)
    lost = of_kind(run, "EngineLost")
    assert [event["engine"] for event in lost] == ["engine-1"]
    reasons = {event["group"]: event["reason"] for event in of_kind(run, "GroupDropped")}
    stale = [group for group, reason in reasons.items() if reason.startswith("stale: lag")]
    unscored = [group for group, reason in reasons.items() if reason == "unscored: no answer within 12 s"]
    assert stale and len(unscored) == 1 and len(reasons) == len(stale) + 1
    status, text = told("doctor", str(run))
    assert status == 0 and text.startswith("finished\n")
    for part in (
        "it served again after",
        f"the last {unscored[0]}: unscored",
        f"the last {stale[-1]}: stale: lag",
    ):
        assert part in text, text
    why = told("inspect", str(run), "--why-dropped")[1]
    assert "stale: lag 2, --max-staleness 1" in why and "1  unscored: no answer within 12 s" in why
    engine = told("inspect", str(run), "--engine", "engine-1")[1]
    assert "2 lives, 1 lost, 1 restarts" in engine and "killed by SIGKILL" in engine
    assert "unscored: no answer within 12 s" in told("inspect", str(run), "--group", unscored[0])[1]
