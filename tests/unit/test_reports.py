"""docs/reports.md: every public report has a test that is named after it, or a decision why it can't occur."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| ((?:ROL|ASY|CKP|MEM|MET|WGT|CFG|DAT|RTR)-\d+) \| (.+) \| (.+) \|$", re.MULTILINE)
CASES = {
    "ROL": "01 02 04 05 07 08 10 11 13 14 16 17 19 20 22 23",
    "ASY": "01 02 04 05 07 08 10 11 13 14",
    "CKP": "01 02 04 05 07 08 10 11 13",
    "MEM": "01 02 04 05 07",
    "MET": "01 02 04 05",
    "WGT": "01 02 04 05 07 08 10 11 13 14 16 17 19 20 22 23 25 26 28 29 31 32",
    "CFG": "01 02 04 05 07 08 10 11 13 14 16 17 19",
    "DAT": "01 02 04 05 07 08 10 11 13 14",
    "RTR": "01 02 04 05 07 08 10 11 13 14 16 17 19 20 22 23",
}
IDS = [f"{kind}-{number}" for kind, numbers in CASES.items() for number in numbers.split()]


def rows() -> dict[str, str]:
    return {found[0]: found[2] for found in ROW.findall((ROOT / "docs" / "reports.md").read_text())}


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_report_has_a_row() -> None:
    assert list(rows()) == IDS


@pytest.mark.parametrize("report", IDS)
def test_the_tests_of_a_report_exist_and_are_named_after_it(report: str) -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", rows()[report])
    if not named:
        decided = (ROOT / "docs" / "decisions.md").read_text()
        assert re.search(rf"^\*\*20\d\d-\d\d-\d\d\. [^*]*{report}", decided, re.MULTILINE), (
            "no test, no decision"
        )
    for path, name in named:
        assert name in functions(ROOT / "tests" / path), path
        assert f"_{report.lower().replace('-', '_')}_" in name
