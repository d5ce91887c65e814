"""`turnout completion bash|zsh|fish`: a script that completes commands, options, their choices and files.

Promises: what is completed is what the help texts say, read when the script is made; the script starts no Python on
TAB (turnout.cli.completion_scripts).
"""

from __future__ import annotations

import contextlib
import io
import os
import re

from turnout.cli.completion_scripts import SCRIPTS, Leaf, Option, Tree
from turnout.cli.options import Parser

HOW = """Prints a script for your shell:
  bash   turnout completion bash > ~/.local/share/bash-completion/completions/turnout
         or, without bash-completion: source <(turnout completion bash) in ~/.bashrc
  zsh    turnout completion zsh > ~/.zfunc/_turnout, with fpath=(~/.zfunc $fpath) before compinit in ~/.zshrc
  fish   turnout completion fish > ~/.config/fish/completions/turnout.fish"""
_WIDE = "400"  # columns: no help text of argparse's is broken into lines
_RUN_OPTIONS = "Options are those of `turnout train"
_FLAG = re.compile(
    r" {2,}(?:-\w(?: \S+)?, )?(--[a-z][a-z0-9-]*)(?: (\{\S+\}|[A-Z]\S*(?: [A-Z]\S*)*))?(?: {2,}(.+)|$)"
)
_USAGE = re.compile(r"\[(--[a-z][a-z0-9-]*)(?: ([A-Z]+))?\]")  # of texts without a list
_SUBCOMMANDS = re.compile(r" \{([a-z,-]+)\} \.\.\.")
_NUMBERS = ("N", "S", "K", "X", "SECONDS")


def command(argv: list[str]) -> int:
    """Prints the script."""
    import argparse

    parser = Parser(
        prog="turnout completion", description=HOW, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shell", choices=tuple(SCRIPTS))
    print(SCRIPTS[parser.parse_args(argv).shell](tree()), end="")
    return 0


def tree() -> Tree:
    """Everything there is to complete, by the table of commands and their help texts."""
    from turnout.cli.main import COMMANDS

    leaves: list[Leaf] = []
    for name, told in COMMANDS.items():
        if name == "train":
            leaves.append(Leaf((name,), told.line, (), True))
            continue
        text = "" if name == "version" else help_text(name)
        subs = _SUBCOMMANDS.search(text)
        leaves.append(Leaf((name,), told.line, options_in(text), _RUN_OPTIONS in text))
        for sub in subs.group(1).split(",") if subs else ():
            line = re.search(rf"^    {sub} +(.+)$", text, re.MULTILINE)
            inner = help_text(name, sub)
            leaf = Leaf((name, sub), line.group(1) if line else "", options_in(inner), _RUN_OPTIONS in inner)
            leaves.append(leaf)
    return Tree(tuple(leaves), run_options())


def help_text(*words: str) -> str:
    """What `turnout WORDS --help` prints."""
    from turnout.cli.main import main

    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _WIDE
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
            main([*words, "--help"])
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before
    return out.getvalue()


def options_in(text: str) -> tuple[Option, ...]:
    """The options that a help text lists, a line each, in the form of argparse."""
    head = text.partition("\n\n")[0] if _RUN_OPTIONS in text else ""
    found = [Option(flag, "", "file" if value else "nothing") for flag, value in _USAGE.findall(head)]
    lines = text.split("\n")
    for at, line in enumerate(lines):
        match = _FLAG.match(line)
        if match is None or match.group(1) in ("--option", *(option.flag for option in found)):
            continue
        flag, value, said = match.groups()
        below = lines[at + 1].strip() if at + 1 < len(lines) and lines[at + 1].startswith(" " * 20) else ""
        choices = tuple(value.strip("{}").split(",")) if value and value.startswith("{") else ()
        takes = "choice" if choices else "nothing" if not value else "number" if value in _NUMBERS else "file"
        found.append(Option(flag, (said or below).strip(), takes, choices))
    return tuple(found)


def run_options() -> tuple[Option, ...]:
    """The options of a run, by their declarations, and those that tell of them."""
    from turnout.config.run_config import GROUPS, specs

    topics = tuple(dict.fromkeys(group.title.lower().split()[0] for group in GROUPS))
    found = [
        Option("--help", "options that most runs set, or those of a topic", "choice", topics),
        Option("--help-all", "all options", "nothing"),
    ]
    for spec in specs().values():
        line = re.split(r"[.:;] ", spec.text)[0].rstrip(".")
        numbers = spec.kind in ("int", "float", "ints")
        takes = {"bool": "nothing", "choice": "choice"}.get(spec.kind, "number" if numbers else "file")
        found.append(Option(spec.flag, line, takes, spec.choices))
        if spec.kind == "bool":
            found.append(Option(f"--no-{spec.flag[2:]}", f"not: {line}", "nothing"))
    return tuple(found)
