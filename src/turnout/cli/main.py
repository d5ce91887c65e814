"""The `turnout` command: one table of commands, each a function in its own module, imported when it is called.

Promises: `turnout --help` imports neither pydantic nor torch; an error raised on purpose ends as its message on
stderr and its exit status, without a traceback (TURNOUT_DEBUG=1 shows it); Ctrl-C ends with 130.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from turnout import __version__
from turnout.core.errors import TurnoutError, one_line

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
    "train": Command(
        "Runs",
        "train a model: turnout train RUN.yaml [--option value ...]",
        "turnout.cli.train:command",
        "turnout.config.help:render_help",
    ),
    "check": Command(
        "Runs", "prove what can be proved of a run's deployment before it starts", "turnout.cli.check:command"
    ),
    "eval": Command("Runs", "score a checkpoint or a running engine", "turnout.cli.eval:command"),
    "inspect": Command(
        "Runs", "tell what became of a run's groups, by its ledger", "turnout.cli.inspect:command"
    ),
    "doctor": Command("Runs", "tell what a run waits for, and why", "turnout.cli.doctor:command"),
    "engines": Command(
        "Engines", "list, add and remove the engines of a run that works", "turnout.cli.engines:command"
    ),
    "serve": Command("Engines", "serve a model over SGLang's HTTP API", "turnout.cli.serve:command"),
    "bench": Command("Engines", "prove that an engine keeps its promises", "turnout.cli.bench:command"),
    "model": Command(
        "Models and weights", "fetch a pretrained model, make a tiny one", "turnout.cli.model:command"
    ),
    "weights": Command(
        "Models and weights",
        "list, verify, compact and follow published versions",
        "turnout.cli.weights:command",
    ),
    "simulate": Command(
        "Other", "run the control plane in virtual worlds with seeded faults", "turnout.cli.simulate:command"
    ),
    "version": Command("Other", "print the version", "turnout.cli.main:version"),
}


def main(argv: list[str] | None = None) -> int:
    """Runs one command; the exit status. `argv` is without the program's name, None for the process's own."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if words else USAGE
    name, rest = words[0], words[1:]
    if name == "--version":
        return version([])
    if name not in COMMANDS:
        print(_unknown(name), file=sys.stderr)
        return USAGE
    return _run(COMMANDS[name], rest)


def _run(command: Command, rest: list[str]) -> int:
    debug = os.environ.get("TURNOUT_DEBUG") == "1"
    try:
        if command.help and any(word in ("-h", "--help") for word in rest):
            print(cast("Callable[[], str]", _find(command.help))(), flush=True)
            return 0
        return cast("Callable[[list[str]], int]", _find(command.target))(rest)
    except TurnoutError as error:
        if debug:
            raise
        print(f"turnout: {one_line(error)}", file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:  # the reader has gone, as in `turnout train --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        if debug:
            raise
        print("turnout: interrupted", file=sys.stderr)
        return INTERRUPTED


def _find(target: str) -> object:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def overview() -> str:
    """The text of `turnout --help`."""
    lines = ["usage: turnout COMMAND [arguments]"]
    group = ""
    for name, command in COMMANDS.items():
        if command.group != group:
            group = command.group
            lines += ["", f"{group}:"]
        lines.append(f"  {name:<10} {command.line}")
    lines += ["", "`turnout COMMAND --help` tells more. TURNOUT_DEBUG=1 shows tracebacks."]
    return "\n".join(lines)


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    hint = f"did you mean `{near[0]}`?" if near else "see `turnout --help`"
    return f"turnout: no command {name!r}; {hint}"


def version(argv: list[str]) -> int:
    """`turnout version`."""
    del argv
    print(f"turnout {__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
