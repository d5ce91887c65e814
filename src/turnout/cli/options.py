"""What several commands read of their command lines."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from turnout.core.errors import ConfigError, Fault

if TYPE_CHECKING:
    from turnout.weights.depot import Depot


class Parser(argparse.ArgumentParser):
    """argparse's, which never shortens names, and says what a wrong word may have meant. Exit status 2."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, allow_abbrev=False, **more)

    def error(self, message: str) -> NoReturn:
        """`turnout COMMAND: what is wrong`, on one line."""
        wrong = message.rpartition(": ")[2].split()[:1] if "unrecognized" in message else []
        if "invalid choice" in message:
            wrong = re.findall(r"invalid choice: '([^']*)'", message)
        known = [word for parser in self._all() for word in parser._option_string_actions]
        known += [choice for action in self._actions for choice in map(str, action.choices or ())]
        near = [match for word in wrong for match in difflib.get_close_matches(word, known, n=1)]
        hint = f"did you mean {near[0]}?" if near else f"see `{self.prog} --help`"
        self.exit(2, f"{self.prog}: {message}; {hint}\n")

    def _all(self) -> Iterator[argparse.ArgumentParser]:
        """This one, and those of its subcommands."""
        yield self
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from action.choices.values()


def split_run_file(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """`RUN.yaml --option ...` -> the file and the rest; a command line that begins with an option has no file."""
    if argv and not argv[0].startswith("-"):
        return Path(argv[0]), list(argv[1:])
    return None, list(argv)


def token_from(variable: str | None, flag: str) -> str | None:
    """The token that the environment holds under this name; raises ConfigError where it has none."""
    if variable is None:
        return None
    found = os.environ.get(variable)
    if not found:
        raise ConfigError(Fault(flag, variable, "the environment has no such variable"))
    return found


def depot_of(store: str) -> Depot:
    """The files of a weight store: a folder, or the URL of an object store."""
    from turnout.placement.real import DiskStore
    from turnout.weights.depot import FolderDepot
    from turnout.weights.object_depot import ObjectDepot, is_url

    return ObjectDepot(store) if is_url(store) else FolderDepot(Path(store), DiskStore())
