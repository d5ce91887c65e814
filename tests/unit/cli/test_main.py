"""The table of commands: errors, exit statuses, help."""

from __future__ import annotations

import io
import subprocess
import sys
import types

import pytest

from turnout import __version__
from turnout.cli import main as cli
from turnout.cli.options import split_run_file
from turnout.core.errors import EXIT_STATUSES, ConfigError, EngineDead, Fault


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


def test_a_file_that_the_system_refuses_is_one_line(command, capsys):
    command(lambda _: _raise(PermissionError(13, "Permission denied", "runs/x")))
    assert cli.main(["train"]) == 1
    assert capsys.readouterr().err == "turnout: runs/x: Permission denied (TURNOUT_DEBUG=1 shows where)\n"


def test_a_closed_stream_is_no_fault(command, monkeypatch):
    command(lambda _: print("told") or 0)
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["train"]) == 0
    command(lambda _: _raise(EngineDead("engine-0", "rollout", "none", "killed")))
    monkeypatch.setattr(sys, "stderr", None)
    assert cli.main(["train"]) == 4
    assert cli.main(["--help"]) == 0


@pytest.mark.parametrize("code", ["main(['--help'])", "main(['train', '--help-all'])"])
def test_a_reader_that_goes_is_no_fault(code):
    program = f"import sys, time; sys.stdin.read(); from turnout.cli.main import main; sys.exit({code})"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()  # before it writes
    process.stdout = None
    _, err = process.communicate("", timeout=60)
    assert (process.returncode, err) == (0, "")


def test_a_stream_that_takes_no_unicode(command, monkeypatch):
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="ascii"))
    command(lambda _: print("0.1 → 0.2") or 0)
    assert cli.main(["train"]) == 0
    assert buffer.getvalue() == b"0.1 ? 0.2\n"


def test_a_mistake_of_the_program_is_not_hidden(command):
    command(lambda _: _raise(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["train"])


def test_control_c(command, capsys):
    command(lambda _: _raise(KeyboardInterrupt()))
    assert cli.main(["train"]) == 130
    assert capsys.readouterr().err == "turnout: interrupted\n"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("trian", "did you mean `train`?"),
        ("zzz", "see `turnout --help`"),
        ("run.yaml", "did you mean `turnout train run.yaml`?"),
    ],
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


def test_help_of_a_command_in_both_orders(capsys):
    assert cli.main(["help", "train"]) == 0
    text = capsys.readouterr().out
    assert cli.main(["train", "--help"]) == 0
    assert capsys.readouterr().out == text and "--help-all" in text


def test_colours_are_for_terminals(monkeypatch, capsys):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    cli.main(["--help"])
    assert "\x1b" not in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    cli.main(["--help"])
    assert "\x1b[1mRuns:\x1b[0m" in capsys.readouterr().out
    cli.main(["trian"])
    assert capsys.readouterr().err.startswith("\x1b[1;31mturnout:\x1b[0m no command")


def test_every_exit_status_is_told(capsys):
    cli.main(["--help"])
    text = capsys.readouterr().out
    for status, meaning in EXIT_STATUSES.items():
        assert f"  {status:<10} {meaning}\n" in text


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["weights", "verfy", "x"], "turnout weights: argument command: invalid choice: 'verfy'"),
        (["weights", "verfy", "x"], "did you mean verify?"),
        (
            ["inspect", "x", "--chek"],
            "turnout inspect: unrecognized arguments: --chek; did you mean --check?",
        ),
        (["engines", "ls", "x", "--jsn"], "did you mean --json?"),
        (["simulate", "--schedule", "asinc"], "did you mean async?"),
        (["doctor"], "the following arguments are required: RUN_DIR; see `turnout doctor --help`"),
        (["doctor", "x", "--js"], "unrecognized arguments: --js"),  # names are never shortened
    ],
)
def test_wrong_words_of_a_command(words, hint, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    err = capsys.readouterr().err
    assert end.value.code == 2 and hint in err and err.count("\n") == 1


def test_version(capsys):
    assert cli.main(["version"]) == 0 and cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"turnout {__version__}\n" * 2


def test_the_run_file_is_the_first_word():
    path, rest = split_run_file(["a.yaml", "--lr", "1"])
    assert str(path) == "a.yaml" and rest == ["--lr", "1"]
    assert split_run_file(["--lr", "1"]) == (None, ["--lr", "1"])
    assert split_run_file([]) == (None, [])
