"""The table of completions before and after training, printed at the end of a run.

Promises: text of a model reaches the terminal only with its control characters made visible, so it can't move
the cursor, change colours or hide text; long texts are cut and say by how much.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

MAX_CHARACTERS = 280
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}  # controls, direction marks, surrogates, private, separators


@dataclass(frozen=True)
class SampleRow:
    """One held-out prompt with its completion before and after; None is "no completion"."""

    prompt: str
    label: str
    before: str | None
    after: str | None
    reward_before: float | None = None
    reward_after: float | None = None


def safe_text(text: str, limit: int = MAX_CHARACTERS) -> str:
    """`text` on one line: line ends as the sign ↵, other controls as escapes, cut after `limit` characters."""
    rest = len(text) - limit
    shown = "".join(map(_visible, text if rest <= 0 else text[:limit]))
    return shown if rest <= 0 else f"{shown} … {rest} more characters"


def _visible(character: str) -> str:
    if character == "\n":
        return "↵"
    if unicodedata.category(character) in _HIDDEN:
        return character.encode("unicode_escape").decode("ascii")
    return character


def print_samples(rows: Sequence[SampleRow], console: Console) -> None:
    """A table on a terminal, blocks of lines elsewhere; nothing where there are no rows."""
    if not rows:
        return
    if not console.is_terminal:
        console.out(_plain(rows), highlight=False)
        return
    table = Table(
        title="Completions on held-out prompts", box=box.ROUNDED, show_lines=True, title_style="bold"
    )
    table.add_column("prompt", ratio=3, style="dim", overflow="fold")
    table.add_column("label", ratio=1)
    table.add_column("before", ratio=4, overflow="fold")
    table.add_column("after", ratio=4, overflow="fold")
    for row in rows:
        table.add_row(
            Text(safe_text(row.prompt)),
            Text(safe_text(row.label, 60)),
            _cell(row.before, row.reward_before),
            _cell(row.after, row.reward_after),
        )
    console.print(table)


def _cell(text: str | None, reward: float | None) -> Text:
    if text is None:
        return Text("-", "dim")
    style = "" if reward is None else "green" if reward > 0 else "red"
    score = "" if reward is None else f"\nreward {reward:.2f}"
    return Text.assemble(safe_text(text), (score, style))


def _plain(rows: Sequence[SampleRow]) -> str:
    lines = ["Completions on held-out prompts"]
    for row in rows:
        lines += ["", f"  prompt  {safe_text(row.prompt)}", f"  label   {safe_text(row.label, 60)}"]
        for name, text, reward in (
            ("before", row.before, row.reward_before),
            ("after ", row.after, row.reward_after),
        ):
            score = "" if reward is None else f" [reward {reward:.2f}]"
            lines.append(f"  {name}  {'-' if text is None else safe_text(text)}{score}")
    return "\n".join(lines)
