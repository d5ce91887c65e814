"""`turnout inspect`: a group's whole history, reasons summed, a step's batch; read beside the writer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cli.inspected import inspected, told
from tests.unit.rollout.ledger_parts import LABELS, as_killed
from turnout.cli.main import main
from turnout.rollout.ledger import Ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return inspected(tmp_path)


def test_without_an_option_groups_by_state(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, tmp_path) == (
        "run the-run, incarnation 0\n"
        "5 groups of 4 prompts\n"
        "  partial    1\n"
        "  trained    1\n"
        "  dropped    2\n"
        "  requeued   1\n"
        "last batch: step 0\n"
        f"versions committed: 2, the last is {LABELS[1]}\n"
        "checkpoints at steps 1\n"
    )


def test_a_group_tells_its_whole_history(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = told(capsys, tmp_path, "--group", "g00000000.1")
    assert out == (
        "group g00000000.1: attempt 1 at prompt p0, trained by step 0\n"
        "  TIME  admit    -> waiting   incarnation 0, step 0\n"
        "  TIME  start    -> inflight  incarnation 0\n"
        "  TIME  cut      -> partial   incarnation 0\n"
        "  TIME  resume   -> inflight  incarnation 0\n"
        "  TIME  complete -> completed incarnation 0\n"
        "  TIME  take     -> taken     incarnation 0, step 0\n"
        "  TIME  train    -> trained   incarnation 0, step 0\n"
        "  tokens are stored\n"
        "  member 0: 4 tokens, ended by stop, reward 0\n"
        f"    tokens 0-2: {LABELS[0]} (committed, of 0 train steps, lag 0)\n"
        f"    tokens 3-3: {LABELS[1]} (committed, of 1 train steps, lag -1)\n"
        "    made by engine-0 (0-2), engine-1 (3-3)\n"
        "  member 1: 5 tokens, ended by stop, reward 0.142857\n"
        f"    tokens 0-2: {LABELS[0]} (committed, of 0 train steps, lag 0)\n"
        f"    tokens 3-4: {LABELS[1]} (committed, of 1 train steps, lag -1)\n"
        "    made by engine-0 (0-2), engine-1 (3-4)\n"
    )
    both = told(capsys, tmp_path, "--group", 0)
    assert both.endswith(out)
    assert "  TIME  requeue  -> requeued  incarnation 0: stale: lag 3\n" in both.removesuffix(out)
    assert told(capsys, tmp_path, "--group", "g00000000") == both


def test_a_forgotten_group_keeps_what_made_it(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = told(capsys, tmp_path, "--group", "g00000000.1")
    ledger.forget(["g00000000.1"])
    assert told(capsys, tmp_path, "--group", "g00000000.1") == stored.replace("are stored", "are forgotten")


def test_pieces_of_a_cut_member_are_told_as_one(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = told(capsys, tmp_path, "--group", 3)
    assert "  member 0: 5 tokens, not ended, unscored\n" in out
    assert f"    tokens 0-2: {LABELS[0]} (committed, of 0 train steps)\n" in out
    assert "    made by engine-0 (0-2), engine-1 (3-4)\n" in out


def test_reasons_are_summed(ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, tmp_path, "--why-dropped") == (
        "2 groups dropped\n         2  all rewards equal\n1 groups requeued\n         1  stale: lag 3\n"
    )


def test_a_step_tells_its_batch_and_its_last_group(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = re.sub(r"\d+\.\d{3} s", "N s", told(capsys, tmp_path, "--step", 0))
    assert out == (
        "step 0, incarnation 0: 1 groups\n"
        "  g00000000.1: 9 tokens, rewards 0, 0.142857, complete after N s, trained by step 0\n"
        "  the last to be complete was g00000000.1 at TIME; it was admitted at TIME\n"
        f"made {LABELS[1]}: committed, incarnation 0, root {LABELS[1].split('-')[1]}{'0' * 16}\n"
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--group", "g9"], "the ledger has no such group"),
        (["--group", "nonsense"], "the ledger has no such group"),
        (["--step", "7"], "the last batch is that of step 0"),
        (["--step", "9" * 20], "the last batch is that of step 0"),
        (["--group", "9" * 20], "the ledger has no such group"),
        (["--group", "\u00b2"], "the ledger has no such group"),
        (["--version", "v\u00b2"], "the run has none of this name"),
        (["--token", "g00000000.1:\u00b2:0"], "names no token"),
        (["--group", "0", "--member", "0", "--token", "9" * 5000], "names no token"),
    ],
)
def test_what_is_not_there_is_refused(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    assert main(["inspect", str(tmp_path), *words]) == 2
    assert why in capsys.readouterr().err


def test_a_folder_without_a_ledger_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert "holds no run -> " in capsys.readouterr().err


def test_a_ledger_whose_writer_was_killed_is_read_without_torch(ledger: Ledger, tmp_path: Path) -> None:
    killed = as_killed(tmp_path, tmp_path / "killed")
    code = (
        "import sys; from turnout.cli.main import main; "
        f"assert main(['inspect', {str(killed / 'ledger.sqlite')!r}, '--why-dropped']) == 0; "
        "assert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "all rewards equal" in done.stdout


def test_a_ledger_that_lies_elsewhere_is_found_by_the_link_to_it(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "ledger.sqlite").symlink_to(tmp_path / "ledger.sqlite")
    assert told(capsys, run) == told(capsys, tmp_path)
    assert [path.name for path in run.iterdir()] == ["ledger.sqlite"], (
        "its log lies beside the file, not the link"
    )


def test_a_check_proves_the_ledger_or_names_what_is_broken(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, tmp_path, "--check") == "5 groups, every history and every token in order\n"
    ledger._connection.execute("DELETE FROM groups WHERE ordinal = 1")
    assert main(["inspect", str(tmp_path), "--check"]) == 70
    out = capsys.readouterr()
    assert "group g00000002.0 stands where attempt 0 at prompt 1 belongs" in out.out
    assert "breaks its promises in 1 places" in out.err
