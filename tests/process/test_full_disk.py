"""The disk of a run gets full, for real: a run ends with the cause, and goes on where it was when there is room."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.run_process import TINY, ended, gone_within, of_kind, start, wait_for

WORDS = (
    "--num-rollout",
    "12",
    "--save-interval",
    "2",
    "--no-plots",
    "--skip-eval-before-train",
    "--engine-threads",
    "1",
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_a_run_on_a_full_disk_ends_with_the_cause_and_goes_on_when_there_is_room(
    disk: Path, schedule: str
) -> None:
    run, filler = disk / "run", disk / "filler"
    beside = ("--async-save",) if schedule == "async" else ()
    words = ("train", str(TINY), "--run-dir", str(run), "--schedule", schedule, *WORDS, *beside)
    process = start(*words)
    wait_for("a checkpoint", lambda: list((run / "checkpoints").glob("step_*/state.json")), process)
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
    status, _, err = ended(process)
    assert (status in (5, 8) and "No space left" in err) or "disk is full" in err, (status, err)
    assert gone_within(run, 5) == []
    done = len(of_kind(run, "StepTrained"))
    assert done < 12
    filler.unlink()
    status, _, err = ended(start(*words))
    assert status == 0, err
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["steps"] == 12 and summary["incarnations"] == 2
    assert summary["audit"]["failed"] == 0 and summary["groups"]["lost"] == 0, summary
