"""The files of a run that questions are answered from: its ledger, its events, its configuration. Read only, also
beside a run that goes on; what isn't asked for isn't read."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from turnout.core.errors import ConfigError, DataError, Fault
from turnout.core.events import Event
from turnout.observe.eventlog import read_events
from turnout.rollout.ledger_read import LedgerReader
from turnout.rollout.ledger_rows import VersionRow

LEDGER = "ledger.sqlite"
DIGITS = 18  # what SQLite can compare with has at least as many
Answer = dict[str, Any]


class Run:
    """`path`: a run's directory, or a ledger's file itself, such as a checkpoint's copy."""

    def __init__(self, path: Path) -> None:
        self.folder = path if path.is_dir() else path.absolute().parent
        self.ledger = LedgerReader.of(path / LEDGER if path.is_dir() else path)

    def close(self) -> None:
        self.ledger.close()

    @cached_property
    def events(self) -> list[tuple[float, Event]]:
        """Raises DataError where there are none."""
        path = self.folder / "events.jsonl"
        if not path.is_file():
            raise DataError(
                Fault("events", str(path), "there is no such file", "name the directory of a run")
            )
        return list(read_events(path))

    @cached_property
    def config(self) -> dict[str, Any]:
        """As the run wrote it; empty where it is gone."""
        path = self.folder / "config.json"
        return cast("dict[str, Any]", json.loads(path.read_bytes())) if path.is_file() else {}

    @cached_property
    def versions(self) -> dict[str, VersionRow]:
        """By label."""
        return {version.label: version for version in self.ledger.versions()}

    def ids(self, wanted: str) -> list[str]:
        """The groups that a text names: an id, or a number for all attempts at a prompt. Raises ConfigError."""
        if self.ledger.find(wanted) is not None:
            return [wanted]
        number = number_of(wanted.removeprefix("g").partition(".")[0])
        rows = [] if number is None else self.ledger.attempts(number)
        if rows and "." not in wanted:
            return [row.group_id for row in rows]
        least = min(number or 0, self.ledger.next_ordinal() - 1)
        near = rows or self.ledger.attempts(least)
        remedy = f"the nearest is {near[-1].group_id}; a number names all attempts" if near else ""
        raise ConfigError(Fault("--group", wanted, "the ledger has no such group", remedy))


def number_of(text: str) -> int | None:
    """A whole number from 0 that a ledger can hold; None for any other text."""
    return int(text) if text.isdecimal() and len(text) <= DIGITS else None


def not_there(flag: str, wanted: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that isn't known, with the nearest one that is."""
    names = sorted(known)
    near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.3) or names[:1]
    remedy = f"did you mean {near[0]}?" if near else ""
    return ConfigError(Fault(flag, wanted, f"the run has none of this name ({len(names)} others)", remedy))


def clock_time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
