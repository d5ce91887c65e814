"""Checkpoints are whole or absent, and the old ones go only after the new one is there (CKP-08)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.weight_files import assets, model
from turnout.core.errors import ConfigError, DeadlineExceeded, WeightError
from turnout.core.version import WeightVersion
from turnout.placement.real import DiskStore, RealClock
from turnout.schedule.checkpoint_state import CheckpointState, newest_checkpoint, read_state, write_state
from turnout.schedule.checkpoints import Contents, RunCheckpoints, SavePlan
from turnout.schedule.save_thread import SaveThread
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.digest import root_of

VERSION = WeightVersion(0, 4, "a" * 32)


class Saver:
    """The trainer's side: writes two files, or fails between them."""

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.saves = self.steps = 0
        self.go, self.over = threading.Event(), threading.Event()

    async def call(self, what: str, work: Any) -> Any:
        if "removed" in what:  # on a thread of its own, as the trainer's is
            return await asyncio.to_thread(work, self)
        assert "save" in what or "exported" in what or "cop" in what
        return work(self)

    def export(self) -> Any:
        return iter(model())

    def copied(self) -> Any:
        """What it writes stays as it is now; the test lets it go on."""
        text = f"{self.steps}"

        def write(folder: Path) -> None:
            assert self.go.wait(60)
            self.save(folder)
            (folder / "trainer.json").write_text(text)
            self.over.set()

        return write

    def save(self, folder: Path) -> None:
        self.saves += 1
        (folder / "master.safetensors").write_bytes(b"m" * 100)
        if self.fault is not None:
            raise self.fault
        (folder / "trainer.json").write_text("{}")


class Run:
    def __init__(self, root: Path, interval: int | None = 1, hf: bool = False, files: Any = None) -> None:
        self.folder, self.hf = root / "save", root / "hf"
        self.trainer: Any = Saver()
        self.assets = root / "assets"
        plan = SavePlan(self.folder, True, interval, self.hf if hf else None, self.assets, 1 << 20)
        self.taken_over: Exception | None = None
        self.told: list[int] = []
        contents = Contents(state, self.ledger, self.check, lambda made: self.told.append(made.step))
        self.made = RunCheckpoints(plan, files or DiskStore(), self.trainer, contents)

    def ledger(self, folder: Path) -> None:
        (folder / "ledger.sqlite").write_bytes(b"l" * 10)

    def check(self, _: Path) -> None:
        if self.taken_over is not None:
            raise self.taken_over

    def save(self, *steps: int, last: bool = False) -> None:
        for step in steps:
            asyncio.run(self.made.save_if_due(step, last and step == steps[-1]))

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir()) if self.folder.exists() else []


def state(step: int, run_id: str = "run") -> CheckpointState:
    return CheckpointState(run_id, 0, step, 12, 1, VERSION, "d" * 64)


def complete(folder: Path) -> bool:
    names = {"master.safetensors", "trainer.json", "ledger.sqlite", "state.json"}
    return {path.name for path in folder.iterdir()} == names and read_state(folder).run_id == "run"


def test_a_checkpoint_holds_trainer_ledger_place_and_version(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(4)
    assert complete(run.folder / "step_000004")
    assert read_state(run.folder / "step_000004") == state(4)
    row = json.loads((run.folder / "step_000004" / "state.json").read_text())
    assert row["files"] == {"ledger.sqlite": 10, "master.safetensors": 100, "trainer.json": 2}


def found(run: Run) -> int | None:
    newest = newest_checkpoint(run.folder, "run", DiskStore())
    return None if newest is None else newest.state.step


def test_ckp_08_a_resume_takes_the_newest_complete_checkpoint_by_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    assert found(run) is None
    run.save(9, 10)
    (run.folder / "step_000010" / "master.safetensors").unlink()
    (run.folder / "step_000100.tmp-ab").mkdir()
    assert found(run) == 9
    assert "step_000010 is passed over: master.safetensors is missing" in caplog.text
    run.made.saved = 9
    run.save(10)  # what was passed over is in the way, and no checkpoint
    assert found(run) == 10 and complete(run.folder / "step_000010")
    assert [name for name in run.names if "broken" in name]
    run.save(999_999, 1_000_000)
    assert found(run) == 1_000_000
    torn = run.folder / "step_1000000" / "ledger.sqlite"
    torn.write_bytes(b"l" * 9)
    assert found(run) == 999_999 and "ledger.sqlite has 9 bytes, not 10" in caplog.text


def test_a_resume_passes_over_checkpoints_of_other_runs(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1, 2)
    path = run.folder / "step_000002"
    (path / "state.json").unlink()
    write_state(path, state(2, "another"))
    assert found(run) == 1
    with pytest.raises(ConfigError, match="is of run another"):
        run.save(3)
        run.made.saved = 1
        run.save(2)


@pytest.mark.parametrize("name", ["state.json", "ledger.sqlite", "trainer.json", "master.safetensors"])
def test_ckp_13_a_missing_component_is_refused_by_name_and_nothing_begins_anew(
    name: str, tmp_path: Path
) -> None:
    run = Run(tmp_path)
    run.save(5)
    (run.folder / "step_000005" / name).unlink()
    with pytest.raises(ConfigError, match=f"step_000005: {name} is missing"):
        found(run)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 1}', '{"format": 2}', '{"format": 2, "files": {}}']
)
def test_a_state_that_is_none_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ValueError, match=r"state\.json is|Expecting"):
        read_state(tmp_path)


def test_ckp_07_parts_are_saved_together_or_not_at_all(tmp_path: Path) -> None:
    """One manifest: a ledger that cannot be copied, or a successor, leaves no checkpoint."""
    run = Run(tmp_path)
    run.save(1)
    run.taken_over = WeightError("incarnation 1 of this run has taken over")
    with pytest.raises(WeightError, match="taken over"):
        run.save(2)
    assert run.names == ["step_000001"] and found(run) == 1 and run.told == [1]


def test_a_step_whose_version_is_not_current_gets_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after an update that failed: its weights would be published as another version than they were."""
    run = Run(tmp_path)
    run.made._contents = Contents(lambda _: None, run.ledger, run.check, lambda _: None)
    run.save(1)
    assert run.names == [] and run.made.saved is None and "is not current" in caplog.text


@pytest.mark.parametrize(
    ("interval", "saved"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (None, [5]), (10, [5])]
)
def test_when_a_checkpoint_is_due(interval: int | None, saved: list[int], tmp_path: Path) -> None:
    run, seen = Run(tmp_path, interval), []
    for step in range(1, 6):
        before = run.trainer.saves
        run.save(step, last=step == 5)
        seen += [step] * (run.trainer.saves - before)
    assert seen == saved


def test_without_periodic_saves_there_is_one_when_asked_only(tmp_path: Path) -> None:
    run = Run(tmp_path)
    plan = SavePlan(run.folder, False, None, None, tmp_path, 1 << 20)
    made = RunCheckpoints(plan, DiskStore(), run.trainer, run.made._contents)
    asyncio.run(made.save_if_due(1, True))
    assert run.trainer.saves == 0
    assert list(tmp_path.iterdir()) == []
    asyncio.run(made.save(1))
    assert run.names == ["step_000001"]


def test_the_two_newest_stay_by_number_and_not_by_name(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(9, 10, 999_999, 1_000_000)
    assert run.names == ["step_1000000", "step_999999"]


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    """The last step may have been due by the interval already."""
    run = Run(tmp_path)
    run.save(3)
    run.save(3, last=True)
    assert run.names == ["step_000003"]
    assert run.trainer.saves == 1


def test_ckp_08_a_save_that_fails_leaves_the_old_ones_and_nothing_else(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1, 2)
    run.trainer.fault = OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space left"):
        run.save(3)
    assert run.names == ["step_000001", "step_000002"]
    assert all(complete(run.folder / name) for name in run.names)


def beside(tmp_path: Path) -> Run:
    """A run whose periodic checkpoints are written beside training."""
    run = Run(tmp_path)
    run.made._beside = SaveThread(RealClock(), 60.0)
    return run


def test_beside_training_a_checkpoint_holds_what_there_was_when_it_was_begun(tmp_path: Path) -> None:
    run = beside(tmp_path)

    async def work() -> None:
        run.trainer.steps = 4
        await run.made.save_if_due(4, False)
        assert run.trainer.saves == 0 and run.made.saved is None, (
            "training goes on before anything is written"
        )
        run.trainer.steps = 5
        next_one = asyncio.ensure_future(run.made.save_if_due(5, False))
        await asyncio.sleep(0)
        assert run.names and not any(complete(run.folder / name) for name in run.names if ".tmp" not in name)
        assert run.told == [] and not next_one.done(), "at most one is under way"
        run.trainer.go.set()
        await next_one
        assert run.told == [4] and (run.folder / "step_000004" / "trainer.json").read_text() == "4"
        run.trainer.steps = 6
        await run.made.save_if_due(6, True)
        assert run.told == [4, 5, 6] and run.made.saved == 6, "the last one is waited for"
        await run.made.close()

    asyncio.run(work())
    assert run.names == ["step_000005", "step_000006"] and complete(run.folder / "step_000005")


def test_what_one_beside_training_failed_with_is_raised_by_the_next_and_the_old_ones_stay(
    tmp_path: Path,
) -> None:
    run = beside(tmp_path)
    run.trainer.go.set()

    async def work() -> None:
        await run.made.save_if_due(1, False)
        await run.made.save_if_due(2, False)
        await run.made.settled()
        run.trainer.fault = OSError(28, "No space left on device")
        await run.made.save_if_due(3, False)
        with pytest.raises(OSError, match="No space left"):
            await run.made.save_if_due(4, False)
        run.trainer.fault, run.taken_over = None, None
        await run.made.save_if_due(5, False)
        await run.made.settled()
        run.trainer.fault = OSError(28, "No space left on device")
        await run.made.save_if_due(6, False)
        await run.made.close()  # told, and the cause of the end stays the cause

    asyncio.run(work())
    assert run.names == ["step_000002", "step_000005"] and run.told == [1, 2, 5]


def test_what_is_still_being_written_at_its_deadline_is_left_to_the_next_save(tmp_path: Path) -> None:
    run = beside(tmp_path)
    run.made._beside = SaveThread(RealClock(), 0.1)

    async def work() -> None:
        await run.made.save_if_due(4, False)
        with pytest.raises(DeadlineExceeded, match="state to be written"):
            await run.made.settled()
        assert [name.partition(".tmp-")[0] for name in run.names] == ["step_000004"]
        run.trainer.go.set()
        assert run.trainer.over.wait(60), "it writes where it did"
        await run.made.save(5)

    asyncio.run(work())
    assert run.names == ["step_000005"] and run.told == [5]


@pytest.mark.parametrize("at", ["next save", "step", "end"])
def test_a_run_that_is_cut_off_waits_for_no_checkpoint(tmp_path: Path, at: str) -> None:
    run = beside(tmp_path)

    async def loop() -> None:
        try:
            await run.made.save_if_due(4, False)
            if at == "next save":
                await run.made.save_if_due(5, False)
            elif at == "step":
                await asyncio.Event().wait()
        finally:
            await run.made.close()

    async def work() -> None:
        main = asyncio.ensure_future(loop())
        for _ in range(9):
            await asyncio.sleep(0)
        assert run.made._under_way is not None
        main.cancel()
        done, _ = await asyncio.wait([main], timeout=20)
        assert done and main.cancelled()
        assert [name.partition(".tmp-")[0] for name in run.names] == ["step_000004"] and run.told == []
        run.trainer.go.set()
        assert run.trainer.over.wait(60), "it writes where it did"

    asyncio.run(work())


def test_a_run_that_was_taken_over_meanwhile_makes_no_checkpoint(tmp_path: Path) -> None:
    run = beside(tmp_path)

    def owned() -> None:
        raise WeightError("taken over")

    run.made._contents = replace(run.made._contents, owned=owned)

    async def work() -> None:
        await run.made.save_if_due(1, False)
        run.trainer.go.set()
        with pytest.raises(WeightError, match="taken over"):
            await run.made.settled()

    asyncio.run(work())
    assert run.names == [] and run.told == []


def test_ckp_08_old_ones_go_only_after_the_new_one_is_complete(tmp_path: Path) -> None:
    order: list[str] = []

    class Noting(DiskStore):
        def publish_folder(self, staged: Path, final: Path) -> None:
            assert complete(staged)
            super().publish_folder(staged, final)
            order.append(f"published {final.name}")

        def remove_tree(self, path: Path) -> None:
            assert threading.current_thread() is not threading.main_thread(), "the event loop goes on"
            order.append(f"removed {path.name}")
            super().remove_tree(path)

    run = Run(tmp_path, files=Noting())
    run.save(1, 2, 3)
    left = run.folder / "step_000004.tmp-0abc"
    left.mkdir()
    run.made._beside = SaveThread(RealClock(), 60.0)
    run.trainer.go.set()

    async def work() -> None:
        await run.made.save_if_due(4, False)
        await run.made.settled()

    asyncio.run(work())
    assert order == [
        "published step_000001",
        "published step_000002",
        "published step_000003",
        "removed step_000001",
        f"removed {left.name}",
        "published step_000004",
        "removed step_000002",
    ]


def test_foreign_folders_are_left_alone(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (run.folder / "step_best").mkdir(parents=True)
    run.save(1, 2, 3)
    assert run.names == ["step_000002", "step_000003", "step_best"]


_CHILD = """
import asyncio, os, signal, sys
from pathlib import Path
from tests.unit.schedule.test_checkpoints import Run

for text in sys.argv[1:]:
    root, at, seen = Path(text), int(Path(text).name), 0
    if os.fork() == 0:
        def trace(event, args):
            global seen
            if event in ("open", "os.rename", "os.mkdir", "os.remove", "shutil.rmtree", "os.rmdir"):
                if str(args[0]).startswith(str(root / "save")):
                    seen += 1
                    if seen == at:
                        os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(trace)
        Run(root).save(3)
        (root / "operations").write_text(str(seen))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def run_children(*roots: Path) -> list[int]:
    """One process per folder: it saves step 3, and the one for folder N kills itself at its N-th operation."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *map(str, roots)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr == ""
    return [int(line) for line in done.stdout.split()]


def test_ckp_08_kill_9_at_any_moment_of_a_save(tmp_path: Path) -> None:
    Run(tmp_path / "0").save(1, 2)
    assert run_children(tmp_path / "0") == [0]
    operations = int((tmp_path / "0" / "operations").read_text())
    assert operations > 8
    roots = [tmp_path / str(at) for at in range(1, operations + 1)]
    for root in roots:
        Run(root).save(1, 2)
    assert run_children(*roots) == [-signal.SIGKILL] * operations
    seen = set()
    for root in roots:
        run = Run(root)
        whole = [name for name in run.names if name.startswith("step_") and "tmp" not in name]
        seen.add(tuple(whole))
        assert len(whole) >= 2
        assert all(complete(run.folder / name) for name in whole)
        run.save(4)
        newest = "step_000003" if "step_000003" in whole else "step_000002"
        assert run.names == [newest, "step_000004"], "what the kill left is gone with the next save"
    assert seen == {
        ("step_000001", "step_000002"),
        ("step_000001", "step_000002", "step_000003"),
        ("step_000002", "step_000003"),
    }


def test_the_last_weights_become_an_ordinary_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, hf=True)
    assets(run.assets)
    run.save(1)
    assert not run.hf.exists()
    run.save(2, last=True)
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in run.hf.iterdir()) == names
    assert root_of(read_checkpoint(run.hf)) == root_of(model())
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("flag", ["--save", "--save-hf"])
def test_what_lies_in_the_way_is_refused_and_kept(flag: str, tmp_path: Path) -> None:
    run = Run(tmp_path, hf=True)
    assets(run.assets)
    place = run.hf if flag == "--save-hf" else run.folder / "step_000001"
    place.mkdir(parents=True)
    (place / "model.safetensors").write_text("old")
    if flag == "--save":
        write_state(place, state(1, "another"))
    with pytest.raises(ConfigError, match=rf"{flag} = .*(holds something already|is of run another)"):
        run.save(1, last=True)
    assert (place / "model.safetensors").read_text() == "old"
    assert not [path for path in tmp_path.rglob("*") if ".tmp-" in path.name]


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    class Failing(DiskStore):
        def publish_folder(self, staged: Path, final: Path) -> None:
            if final.name == "hf":
                raise OSError(28, "No space left on device")
            super().publish_folder(staged, final)

    run = Run(tmp_path, hf=True, files=Failing())
    assets(run.assets)
    with pytest.raises(OSError, match="No space left"):
        run.save(1, last=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["assets", "save"]
