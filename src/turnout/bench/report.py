"""The outcome of a suite as JSON, as a table for the terminal, and as an exit status.

JSON keys: `engine`, `passed`, `failed`, `absent` (counts), `checks` (a list of {name, group, result, detail,
seconds}). The exit status is 0 only where something passed and nothing failed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from turnout.bench.registry import Outcome, Result

MARKS = {Result.PASSED: "ok", Result.FAILED: "FAILED", Result.ABSENT: "absent"}
DETAIL_MAX = 400


@dataclass(frozen=True)
class Report:
    """All outcomes of one run; `engine` says what was tested, `facts` what it says of itself."""

    engine: str
    outcomes: tuple[Outcome, ...]

    def count(self, result: Result) -> int:
        return sum(outcome.result is result for outcome in self.outcomes)

    @property
    def exit_status(self) -> int:
        return 0 if self.count(Result.PASSED) and not self.count(Result.FAILED) else 1

    def to_json(self) -> str:
        rows = [asdict(o) | {"seconds": round(o.seconds, 3)} for o in self.outcomes]
        counts = {str(result): self.count(result) for result in Result}
        return json.dumps({"engine": self.engine, **counts, "checks": rows}, indent=2) + "\n"

    def summary(self) -> str:
        """The last line: counts, and the names of what failed."""
        failed = [o.name for o in self.outcomes if o.result is Result.FAILED]
        named = f" ({', '.join(failed)})" if failed else ""
        passed, absent = self.count(Result.PASSED), self.count(Result.ABSENT)
        return f"{passed} passed, {len(failed)} failed{named}, {absent} absent"


def line(outcome: Outcome) -> str:
    """One row of the table."""
    return f"  {MARKS[outcome.result]:<7} {outcome.name:<34} {outcome.seconds:6.2f} s  {outcome.detail}"


def table(outcomes: Sequence[Outcome]) -> str:
    """All rows under the headings of their groups."""
    lines: list[str] = []
    group = ""
    for outcome in outcomes:
        if outcome.group != group:
            group = outcome.group
            lines += ["", group]
        lines.append(line(outcome))
    return "\n".join(lines[1:] if lines else [])


def one_line(text: str) -> str:
    """A detail as one line of bounded length."""
    flat = " ".join(text.split())
    return flat if len(flat) <= DETAIL_MAX else flat[: DETAIL_MAX - 3] + "..."
