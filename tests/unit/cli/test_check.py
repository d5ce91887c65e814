"""`turnout check` as a command: its words, its exit status, and that it leaves nothing. Engines: tests/process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.object_store import environment, s3_server
from turnout.cli.check import command
from turnout.cli.main import main
from turnout.weights.object_depot import ObjectDepot

RUN = Path(__file__).parents[3] / "examples" / "tiny.yaml"
ROOT = Path(__file__).parents[3]


def test_a_run_of_its_own_engines_is_proved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "not" / "yet"
    assert command([str(RUN), "--hf-checkpoint", "tiny:llama", "--run-dir", str(folder), "--json"]) in (0, 3)
    told = json.loads(capsys.readouterr().out)
    lines = {line["name"]: line["result"] for line in told["lines"]}
    assert lines["weight directory"] == "proved" and "addresses" not in lines
    assert not folder.parent.exists()


def test_an_object_store(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A real S3 over HTTP: a bucket that is there keeps nothing of the probe, one that is not fails the line."""
    monkeypatch.chdir(ROOT)
    with s3_server() as endpoint:
        for name, value in environment(endpoint).items():
            monkeypatch.setenv(name, value)
        for bucket, result in (("weights", "proved"), ("nowhere", "failed")):
            url = f"s3://{bucket}/run"
            command([str(RUN), "--run-dir", str(tmp_path / "run"), "--json", "--update-weight-disk-dir", url])
            told = json.loads(capsys.readouterr().out)
            assert {line["name"]: line["result"] for line in told["lines"]}["weight directory"] == result
        assert ObjectDepot("s3://weights/run").sizes() == {}


def test_refused_options_are_the_list(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert command([str(RUN), "--lr", "0", "--seed", "x"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("options  failed: ") and "--lr" in out and "--seed" in out and "->" in out


@pytest.mark.parametrize("words", [["--deadline"], ["--deadline", "0"], ["--deadline", "x"]])
def test_a_deadline_that_is_none(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(RUN), *words]) == 2
    assert "--deadline" in capsys.readouterr().err


def test_without_words_it_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert command([]) == 2 and command(["--help"]) == 0
    assert capsys.readouterr().out.count("usage: turnout check") == 2
