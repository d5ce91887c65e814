"""docs/weights.md shows the tables that the code runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnout.weights.engine_machine import ENGINE_TABLE
from turnout.weights.state_tables import render, renewed
from turnout.weights.update_machine import TABLE

PAGE = Path(__file__).parents[3] / "docs" / "weights.md"


def test_the_page_has_the_tables_of_the_code() -> None:
    """`python -m turnout.weights.state_tables docs/weights.md` renews them."""
    page = PAGE.read_text(encoding="utf-8")
    assert renewed(page) == page


def test_every_row_of_the_code_is_a_cell() -> None:
    cells = [
        cell.strip()
        for line in render().splitlines()
        if line.startswith("| **")
        for cell in line.strip("|").split("|")[1:]
    ]
    assert sum(bool(cell) for cell in cells) == len(TABLE.rows) + len(ENGINE_TABLE.rows)


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="state tables"):
        renewed("# page\n")
