"""Where a run writes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from turnout.config import load
from turnout.config.rundir import make_run_dir
from turnout.core.errors import ConfigError


def test_numbers_follow_each_other(write, folder):
    config = load(write(), [])
    roots = [make_run_dir(config).root for _ in range(3)]
    assert [root.name for root in roots] == ["quick-001", "quick-002", "quick-003"]
    assert roots[0] == folder / "runs" / "quick-001" and roots[0].is_dir()


def test_two_runs_that_start_at_once_get_two_folders(write):
    config = load(write(), [])
    with ThreadPoolExecutor(8) as pool:
        roots = list(pool.map(lambda _: make_run_dir(config).root, range(16)))
    assert len(set(roots)) == 16


def test_a_given_folder_is_made_and_weights_may_lie_elsewhere(write, folder):
    paths = make_run_dir(load(write(), ["--run-dir", "a/b", "--update-weight-disk-dir", "shared"]))
    assert paths.root == folder / "a" / "b" and paths.root.is_dir()
    assert paths.weights == folder / "shared"
    assert make_run_dir(load(write(), ["--run-dir", "c"])).weights == folder / "c" / "weights"


def test_a_folder_that_got_a_run_meanwhile_is_refused(write, folder):
    config = load(write(), ["--run-dir", "a"])
    (folder / "a").mkdir()
    (folder / "a" / "events.jsonl").touch()
    with pytest.raises(ConfigError, match=r"it has no run\.json"):
        make_run_dir(config)
    assert not make_run_dir(load(write(), ["--run-dir", "b"])).resumed
    (folder / "a" / "run.json").touch()
    assert make_run_dir(config).resumed
    with pytest.raises(ConfigError, match="holds a run already"):
        make_run_dir(config.model_copy(update={"resume": "never"}))


def test_the_ledger_may_lie_elsewhere_and_the_folder_of_the_run_has_a_link_to_it(write, folder):
    config = load(write(), ["--run-dir", "a", "--ledger-dir", "local/disk"])
    paths = make_run_dir(config)
    assert paths.ledger == folder / "local" / "disk" / "ledger.sqlite"
    assert (paths.root / "ledger.sqlite").is_symlink()
    paths.ledger.write_text("x")
    assert make_run_dir(config).ledger == paths.ledger, "the same run, which goes on"
    assert make_run_dir(load(write(), ["--run-dir", "b"])).ledger == folder / "b" / "ledger.sqlite"
    for words in (["--run-dir", "c"], []):
        with pytest.raises(ConfigError, match=r"local/disk: holds a ledger\.sqlite already"):
            make_run_dir(load(write(), [*words, "--ledger-dir", "local/disk"]))
    with pytest.raises(ConfigError, match=r"--ledger-dir = train\.jsonl/x: can't be used"):
        make_run_dir(load(write(), ["--run-dir", "d", "--ledger-dir", "train.jsonl/x"]))


def test_a_folder_that_can_not_be_made(write, folder):
    config = load(write(), ["--run-dir", "train.jsonl/x"])
    with pytest.raises(ConfigError, match="can't be made"):
        make_run_dir(config)


def test_where_no_run_can_be_kept(write, folder):
    (folder / "runs").touch()
    with pytest.raises(ConfigError, match="runs can't be made or written: File exists -> give a folder"):
        make_run_dir(load(write(), []))
