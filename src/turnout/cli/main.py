"""The `turnout` command: one table of commands, each a function in its own module, imported when it is called.

Promises: `turnout --help` imports neither pydantic nor torch; an error raised on purpose ends as its message on
stderr and its exit status, without a traceback (TURNOUT_DEBUG=1 shows it), and so does a file that the system
refuses; Ctrl-C ends with 130. A stream that is closed, or takes no Unicode, is no fault.
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import importlib
import io
import os
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO, cast

from turnout import __version__
from turnout.core.errors import EXIT_STATUSES, TurnoutError, one_line
from turnout.core.terminal import BOLD, CYAN, RED, has_colors, painted

INTERRUPTED = 130
USAGE = 2


@dataclass(frozen=True)
class Command:
    """`target` is module:function, called with the arguments after the name; `help` the same for its help text,
    where that can be had without importing the command."""

    group: str
    line: str
    target: str
    help: str = ""


COMMANDS: dict[str, Command] = {
    "new": Command(
        "Runs",
        "write a run to begin with: a commented run.yaml, a reward to edit and a little data",
        "turnout.cli.new:command",
    ),
    "train": Command(
        "Runs",
        "train a model: turnout train RUN.yaml [--option value ...]",
        "turnout.cli.train:command",
        "turnout.cli.main:train_help",
    ),
    "check": Command(
        "Runs", "prove what can be proved of a run's deployment before it starts", "turnout.cli.check:command"
    ),
    "plan": Command(
        "Runs", "recommend layout, schedule, transport and sizes for a run", "turnout.cli.plan:command"
    ),
    "eval": Command("Runs", "score a checkpoint or a running engine", "turnout.cli.eval:command"),
    "inspect": Command(
        "Runs", "tell what became of a run's groups, by its ledger", "turnout.cli.inspect:command"
    ),
    "doctor": Command("Runs", "tell what a run waits for, and why", "turnout.cli.doctor:command"),
    "dash": Command("Runs", "show a run as a web page, live or after its end", "turnout.cli.dash:command"),
    "engines": Command(
        "Engines", "list, add and remove the engines of a run that works", "turnout.cli.engines:command"
    ),
    "serve": Command("Engines", "serve a model over SGLang's HTTP API", "turnout.cli.serve:command"),
    "bench": Command("Engines", "prove that an engine keeps its promises", "turnout.cli.bench:command"),
    "model": Command(
        "Models and weights",
        "fetch a pretrained model, make a tiny one, upload a trained one",
        "turnout.cli.model:command",
    ),
    "weights": Command(
        "Models and weights",
        "list, verify, compact and follow published versions",
        "turnout.cli.weights:command",
    ),
    "simulate": Command(
        "Other", "run the control plane in virtual worlds with seeded faults", "turnout.cli.simulate:command"
    ),
    "completion": Command(
        "Other",
        "print a script that completes commands and options in a shell",
        "turnout.cli.completion:command",
    ),
    "version": Command("Other", "print the version", "turnout.cli.main:version"),
}


def main(argv: list[str] | None = None) -> int:
    """Runs one command; the exit status. `argv` is without the program's name, None for the process's own."""
    if argv is None:
        status = main(sys.argv[1:])
        return _leave(status) if status else 0
    debug = os.environ.get("TURNOUT_DEBUG") == "1"
    for stream in (
        sys.stdout,
        sys.stderr,
    ):  # a locale without the panel's characters is no reason to end a run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        status = _dispatch(argv)
        if sys.stdout is not None:  # which `>&-` makes it
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has gone, as in `turnout train --help | head`
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        if debug:
            raise
        return _fault("interrupted", INTERRUPTED)
    except (TurnoutError, OSError) as error:
        if debug:
            raise
        if isinstance(error, TurnoutError):
            return _fault(one_line(error), error.exit_status)
        place = f"{error.filename}: " if error.filename else ""
        return _fault(f"{place}{error.strerror or error} (TURNOUT_DEBUG=1 shows where)", 1)


def _leave(status: int) -> int:
    """A thread still in a call of C++ (a train step that was cut off) would abort the interpreter at its end: the
    process ends here instead, after what is to be done at its end."""
    if any(thread.daemon for thread in threading.enumerate()):
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(status)
    return status


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["help"] and len(words) > 1:  # as of other programs: `turnout help train`
        words = [words[1], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview(_colors(sys.stdout)))
        return 0 if words else USAGE
    name, rest = words[0], words[1:]
    if name == "--version":
        return version([])
    if name not in COMMANDS:
        return _fault(_unknown(name), USAGE)
    command = COMMANDS[name]
    if command.help and any(word in ("-h", "--help", "--help-all") for word in rest):
        print(cast("Callable[[list[str]], str]", _find(command.help))(rest))
        return 0
    return cast("Callable[[list[str]], int]", _find(command.target))(rest)


def _colors(stream: TextIO | None) -> bool:
    return has_colors(stream is not None and stream.isatty(), os.environ)


def _fault(text: str, status: int) -> int:
    """Says what was wrong; the exit status."""
    if sys.stderr is not None:
        prefix = painted("turnout:", RED, _colors(sys.stderr))
        with contextlib.suppress(OSError):
            print(f"{prefix} {text}", file=sys.stderr)
    return status


def _find(target: str) -> object:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def overview(colors: bool = False) -> str:
    """The text of `turnout --help`."""
    lines = ["usage: turnout COMMAND [arguments]"]
    group = ""
    for name, command in COMMANDS.items():
        if command.group != group:
            group = command.group
            lines += ["", painted(f"{group}:", BOLD, colors)]
        lines.append(f"  {painted(name, CYAN, colors)}{' ' * (10 - len(name))} {command.line}")
    lines += ["", painted("Exit status:", BOLD, colors)]
    lines += [f"  {status:<10} {meaning}" for status, meaning in EXIT_STATUSES.items()]
    lines += ["", "`turnout COMMAND --help` tells more. TURNOUT_DEBUG=1 shows tracebacks."]
    return "\n".join(lines)


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    hint = "see `turnout --help`"
    if near:
        hint = f"did you mean `{near[0]}`?"
    elif name.endswith((".yaml", ".yml", ".json")):
        hint = f"did you mean `turnout train {name}`?"
    return f"no command {name!r}; {hint}"


def train_help(words: list[str]) -> str:
    """`turnout train --help`, `--help TOPIC`, `--help-all`, for this terminal."""
    from turnout.config.help import Look, render_help

    width = min(100, max(40, shutil.get_terminal_size((100, 40)).columns))
    return render_help(words, Look(width, _colors(sys.stdout))).rstrip("\n")


def version(argv: list[str]) -> int:
    """`turnout version`."""
    del argv
    print(f"turnout {__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
