"""A run that is killed and goes on where the weights come out otherwise (another machine): what --on-resume does
with the tokens that weights of the first life made, in real processes; and that other engines, and other trainer
ranks, go on with it too."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.process.run_process import gone_within, of_kind, wait_for
from tests.resume_kills import STEPS, Run, check_end
from turnout.rollout.ledger_check import problems
from turnout.rollout.ledger_read import LedgerReader

SAVED = 4  # the checkpoint that the second life begins with; the next one is at the end
MORE = ("--save-interval", str(SAVED), "--eval-interval", "100", "--skip-eval-before-train")
OTHERWISE = """
from turnout.train import lr_schedule

def faster(settings, applied, rate=lr_schedule.learning_rate):
    return 1.5 * rate(settings, applied)

lr_schedule.learning_rate = faster
"""


def published(folder: Path, incarnation: int) -> dict[str, int]:
    """Label -> train steps in it, of one life."""
    rows = [row for row in of_kind(folder, "VersionPublished") if row["incarnation"] == incarnation]
    return {row["version"]: row["step"] for row in rows}


def has_tokens_after_the_checkpoint(folder: Path) -> bool:
    late = {label for label, step in published(folder, 0).items() if step > SAVED}
    return any(late & set(row["versions"]) for row in of_kind(folder, "GroupCompleted"))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Killed once a group is complete with tokens of weights that the checkpoint does not have."""
    run = Run(tmp_path_factory.mktemp("killed") / "run", "free")
    process = run.start(*MORE)
    wait_for("tokens after the checkpoint", lambda: has_tokens_after_the_checkpoint(run.folder), process)  # type: ignore[arg-type]
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert gone_within(run.folder, 20) == []
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == [f"step_{SAVED:06d}"]
    return run


def again(killed: Run, folder: Path, *words: str) -> tuple[Run, dict[str, Any]]:
    """A second life of a copy of the run, to its end, and its summary."""
    shutil.copytree(killed.folder, folder / "run")
    run = Run(folder / "run", "free")
    run.finish(*MORE, *words)
    check_end(run)
    ledger = LedgerReader.of(run.folder / "ledger.sqlite")
    assert list(problems(ledger)) == []
    ledger.close()
    return run, json.loads((run.folder / "summary.json").read_text())


@pytest.mark.parametrize("policy", ["mask", "drop"])
def test_tokens_of_weights_that_were_made_otherwise(
    killed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(OTHERWISE)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    run, summary = again(killed, tmp_path, "--on-resume", policy)
    roots = [row for row in of_kind(run.folder, "VersionPublished") if row["step"] > SAVED]
    lives = [{row["root"] for row in roots if row["incarnation"] == life} for life in (0, 1)]
    assert lives[0] and not lives[0] & lives[1], "the second life made other weights"
    gone = {label for label, step in published(run.folder, 0).items() if step > SAVED}
    made = {row["group"]: row for row in of_kind(run.folder, "GroupCompleted")}
    hit = {group for group, row in made.items() if gone & set(row["versions"])}
    trained = {row["group"]: row for row in second_life(run.folder, "GroupTrained")}
    dropped = {row["group"]: row["reason"] for row in second_life(run.folder, "GroupDropped")}
    assert hit
    assert not [row for row in trained.values() if gone & set(row["versions"])], "none of them carried loss"
    assert summary["groups"]["dropped"] == len(dropped)
    if policy == "drop":
        assert hit <= dropped.keys() and not hit & trained.keys()
        assert all(dropped[group].endswith("which a resume made otherwise") for group in hit)
        return
    assert not dropped and hit & trained.keys(), "they stay in their batches"
    told = {row["step"]: row["tokens"] for row in second_life(run.folder, "StepTrained")}
    for step, tokens in told.items():
        groups = [row["group"] for row in trained.values() if row["step"] == step]
        length = sum(lengths[0] for group in groups for lengths in made[group]["lengths"])
        assert tokens <= length and (tokens == length) == (not hit & set(groups))


def second_life(folder: Path, kind: str) -> list[dict[str, Any]]:
    text = (folder / "events.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in text]
    begins = [at for at, row in enumerate(rows) if row["event"] == "RunStarted"]
    assert len(begins) == 2
    return [row for row in rows[begins[1] :] if row["event"] == kind]


def test_engines_of_other_ranks_go_on_with_it(killed: Run, tmp_path: Path) -> None:
    """One engine of two ranks in place of two engines; the same weights are made again, so that no token goes."""
    ranks = ("--rollout-num-engines", "1", "--rollout-num-gpus-per-engine", "2")
    run, summary = again(killed, tmp_path, *ranks)
    assert summary["incarnations"] == 2 and summary["groups"]["dropped"] == 0
    recorded = [row["root"] for row in of_kind(run.folder, "VersionPublished") if row["step"] == SAVED + 1]
    assert len(set(recorded)) == 1 < len(recorded)
    assert len({row["group"] for row in of_kind(run.folder, "GroupTrained")}) == 3 * STEPS


def test_another_number_of_trainer_ranks_goes_on_with_it(killed: Run, tmp_path: Path) -> None:
    run, summary = again(killed, tmp_path, "--actor-num-gpus-per-node", "2")
    assert (summary["incarnations"], summary["ranks"]["count"]) == (2, 2)
    assert [row["step"] for row in second_life(run.folder, "StepTrained")] == list(range(SAVED, STEPS))
