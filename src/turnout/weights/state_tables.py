"""The state tables of a weight update as Markdown, from the tables that the code runs.

`python -m turnout.weights.state_tables docs/weights.md` writes them between the page's two markers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from turnout.weights.engine_machine import ENGINE_TABLE, Engine, Fact
from turnout.weights.update_machine import TABLE, Phase

BEGIN, END = "<!-- state tables -->\n", "<!-- end of state tables -->\n"


def render() -> str:
    """Both tables: a row for each state, a column for each event; an empty cell is refused."""
    events = {event: event.__name__ for _, event in TABLE.rows}
    facts = {fact: str(fact) for fact in Fact}
    tables = (
        _table("update", list(Phase), events, TABLE.rows),
        _table("engine", list(Engine), facts, ENGINE_TABLE.rows),
    )
    return BEGIN + "\n" + "\n".join(tables) + "\n" + END


def renewed(page: str) -> str:
    """The page with the tables as they are now; raises ValueError where it has no markers."""
    before, _, rest = page.partition(BEGIN)
    _, marker, after = rest.partition(END)
    if not marker:
        raise ValueError(f"no {BEGIN.strip()} ... {END.strip()} in the page")
    return before + render() + after


def _table(
    name: str,
    states: Sequence[StrEnum],
    events: Mapping[Any, str],
    rows: Mapping[Any, StrEnum],
) -> str:
    lines = [f"| {name} | {' | '.join(events.values())} |", "|---" * (len(events) + 1) + "|"]
    for state in states:
        cells = [str(rows.get((state, event), "")) for event in events]
        lines.append(f"| **{state}** | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        sys.stderr.write("usage: python -m turnout.weights.state_tables docs/weights.md\n")
        return 2
    page = Path(argv[0])
    page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
