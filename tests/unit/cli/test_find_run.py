"""Naming a run on a command line."""

from __future__ import annotations

import pytest

from turnout.cli.find_run import find_run
from turnout.core.errors import ConfigError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def runs(folder):
    """Three runs in `runs`, one elsewhere, and a folder that holds none."""
    for name in ("runs/quick-001", "runs/quick-002", "runs/other-001", "far/away"):
        (folder / name).mkdir(parents=True)
        (folder / name / "run.json").touch()
    (folder / "runs" / "empty").mkdir()
    (folder / "runs" / "quick-001" / "events.jsonl").touch()
    return folder


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("runs/quick-001", "runs/quick-001"),
        ("runs/quick-001/", "runs/quick-001"),
        ("runs/quick-001/run.json", "runs/quick-001"),
        ("runs/quick-001/events.jsonl", "runs/quick-001"),
        ("quick-001", "runs/quick-001"),
        ("quick", "runs/quick-002"),
        ("far/away", "far/away"),
    ],
)
def test_a_run_is_found_by_its_folder_or_name(text, found, runs):
    assert find_run(text).resolve() == runs / found


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("runs/quik-001", "runs/quik-001: there is no such folder -> did you mean runs/quick-001"),
        ("far", "holds no run -> did you mean far/away?"),
        ("runs/empty", "holds no run -> did you mean runs/"),
        ("nothing/like/it", "did you mean runs/"),
        ("~nobody-of-this-name/run", "there is no such folder -> did you mean runs/"),
    ],
)
def test_what_is_no_run_is_told_with_the_nearest(text, told, runs):
    with pytest.raises(ConfigError) as fault:
        find_run(text)
    assert told in str(fault.value).replace("RUN_DIR = " + text, text)


def test_inside_a_run_a_wrong_name_is_not_that_run(runs, monkeypatch):
    monkeypatch.chdir(runs / "runs" / "quick-001")
    assert find_run(".").resolve() == find_run("events.jsonl").resolve() == runs / "runs" / "quick-001"
    with pytest.raises(ConfigError, match="there is no such folder"):
        find_run("quick-003")


def test_where_there_is_no_run_at_all(folder):
    with pytest.raises(ConfigError, match="give the directory of one"):
        find_run("x")
