"""The table of commands: errors, exit statuses, help."""

from __future__ import annotations

import sys
import types

import pytest

from turnout import __version__
from turnout.cli import main as cli
from turnout.cli.options import split_run_file
from turnout.core.errors import ConfigError, EngineDead, Fault


@pytest.fixture
def command(monkeypatch):
    """Puts a function in the place of `turnout train`."""

    def install(function):
        module = types.ModuleType("fake_command")
        module.command = function  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setitem(sys.modules, "fake_command", module)
        monkeypatch.setitem(cli.COMMANDS, "train", cli.Command("Runs", "x", "fake_command:command"))

    return install


def _raise(error):
    raise error


def test_arguments_reach_the_command_and_its_status_comes_back(command):
    seen = []
    command(lambda argv: seen.append(argv) or 3)
    assert cli.main(["train", "a.yaml", "--lr", "1"]) == 3
    assert seen == [["a.yaml", "--lr", "1"]]


def test_an_error_on_purpose_is_its_message_and_status(command, capsys):
    command(lambda _: _raise(ConfigError([Fault("--a", "1", "bad"), Fault("--b", "2", "worse", "mend")])))
    assert cli.main(["train"]) == 2
    err = capsys.readouterr().err
    assert err.splitlines() == [
        "turnout: configuration refused (2 faults)",
        "  --a = 1: bad",
        "  --b = 2: worse -> mend",
    ]
    command(lambda _: _raise(EngineDead("engine-0", "rollout", "v000001-aa", "killed")))
    assert cli.main(["train"]) == 4
    assert "engine-0 failed in phase rollout, last version v000001-aa" in capsys.readouterr().err


def test_debug_shows_the_traceback(command, monkeypatch):
    monkeypatch.setenv("TURNOUT_DEBUG", "1")
    command(lambda _: _raise(ConfigError(Fault("--a", "1", "bad"))))
    with pytest.raises(ConfigError):
        cli.main(["train"])


def test_a_mistake_of_the_program_is_not_hidden(command):
    command(lambda _: _raise(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["train"])


def test_control_c(command, capsys):
    command(lambda _: _raise(KeyboardInterrupt()))
    assert cli.main(["train"]) == 130
    assert capsys.readouterr().err == "turnout: interrupted\n"


@pytest.mark.parametrize(
    ("word", "hint"), [("trian", "did you mean `train`?"), ("zzz", "see `turnout --help`")]
)
def test_an_unknown_command(word, hint, capsys):
    assert cli.main([word]) == 2
    assert hint in capsys.readouterr().err


def test_help(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name}" in text for name in cli.COMMANDS)
    assert cli.main([]) == 2
    assert capsys.readouterr().out == text


def test_help_of_train_lists_the_options(capsys):
    assert cli.main(["train", "run.yaml", "--help"]) == 0
    assert "--rollout-batch-size N >= 1" in capsys.readouterr().out


def test_version(capsys):
    assert cli.main(["version"]) == 0 and cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"turnout {__version__}\n" * 2


def test_the_run_file_is_the_first_word():
    path, rest = split_run_file(["a.yaml", "--lr", "1"])
    assert str(path) == "a.yaml" and rest == ["--lr", "1"]
    assert split_run_file(["--lr", "1"]) == (None, ["--lr", "1"])
    assert split_run_file([]) == (None, [])
