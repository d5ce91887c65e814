"""The lines of `turnout check`: a result that never just says OK, how it was found, and what to do. Pure.

Promises: a line is as bad as its worst finding; the exit status is 0 where every line is proved, 1 where one
failed, 3 where none failed and something is not provable from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from turnout.core.errors import ConfigError

NOT_PROVABLE_STATUS = 3


class Result(StrEnum):
    PROVED = "proved"
    UNKNOWN = "not provable here"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """One result: of what (an engine, a folder; empty: of the run), and how it was found, or what was seen."""

    result: Result
    how: str
    subject: str = ""


def proved(how: str, subject: str = "") -> Finding:
    return Finding(Result.PROVED, how, subject)


def failed(how: str, subject: str = "") -> Finding:
    return Finding(Result.FAILED, how, subject)


def unknown(how: str, subject: str = "") -> Finding:
    return Finding(Result.UNKNOWN, how, subject)


@dataclass(frozen=True)
class Line:
    """One line of the list: what is claimed, its findings (at least one), and the remedy where it is not proved."""

    name: str
    claim: str
    findings: tuple[Finding, ...]
    remedy: str

    @property
    def result(self) -> Result:
        found = {finding.result for finding in self.findings}
        return next(worst for worst in (Result.FAILED, Result.UNKNOWN, Result.PROVED) if worst in found)

    def row(self) -> dict[str, Any]:
        """For --json."""
        found = [{"subject": f.subject, "result": f.result.value, "how": f.how} for f in self.findings]
        remedy = "" if self.result is Result.PROVED else self.remedy
        return {
            "name": self.name,
            "claim": self.claim,
            "result": self.result.value,
            "findings": found,
            "remedy": remedy,
        }


def exit_status(lines: Sequence[Line]) -> int:
    found = {line.result for line in lines}
    return 1 if Result.FAILED in found else NOT_PROVABLE_STATUS if Result.UNKNOWN in found else 0


def refused(fault: ConfigError) -> list[Line]:
    """The list of a run whose options are refused: every fault, and nothing else can be looked at."""
    found = tuple(failed(f"{f.value + ': ' if f.value else ''}{f.reason}", f.where) for f in fault.faults)
    remedies = dict.fromkeys(f.remedy for f in fault.faults if f.remedy)
    return [Line("options", OPTIONS_CLAIM, found, "; ".join(remedies))]


OPTIONS_CLAIM = "the options are valid and none excludes another"


def render(lines: Sequence[Line]) -> str:
    """The list as text."""
    width = max(len(line.name) for line in lines)
    rows: list[str] = []
    for line in lines:
        rows.append(f"{line.name:<{width}}  {line.result.value}: {line.claim}")
        shown = line.findings if line.result is Result.PROVED else sorted(line.findings, key=_worst_first)
        rows += [f"{'':<{width}}    {_told(finding)}" for finding in shown]
        if line.result is not Result.PROVED and line.remedy:
            rows.append(f"{'':<{width}}    -> {line.remedy}")
    return "\n".join(rows)


def _worst_first(finding: Finding) -> int:
    return (Result.FAILED, Result.UNKNOWN, Result.PROVED).index(finding.result)


def _told(finding: Finding) -> str:
    mark = "" if finding.result is Result.PROVED else f" [{finding.result.value}]"
    return f"{finding.subject + ': ' if finding.subject else ''}{finding.how}{mark}"
