"""docs/algorithms: a page for every algorithm, in the index with what it really is, and no flag that isn't."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from turnout.config.estimators import ESTIMATORS
from turnout.config.run_config import specs

PAGES = Path(__file__).parents[3] / "docs" / "algorithms"
INDEX = (PAGES / "README.md").read_text(encoding="utf-8")


def test_every_estimator_can_be_chosen_and_the_reverse():
    assert specs()["advantage_estimator"].choices == tuple(ESTIMATORS)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_has_a_page_with_its_paper_and_a_row_in_the_index(name):
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert re.search(r"arXiv \d{4}\.\d{5}", page) and f"`--advantage-estimator {name}`" in page
    assert f"[`{name}`]({name}.md)" in INDEX


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_index_has_the_clips_that_are_the_defaults(name):
    (row,) = [line for line in INDEX.splitlines() if line.startswith(f"| [`{name}`]")]
    shown = [float(re.sub(r" \(.*\)", "", cell)) for cell in row.split("|")[-2].split(",")]
    assert tuple(shown) == ESTIMATORS[name].clip


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.name)
def test_every_flag_of_a_page_is_an_option(page):
    flags = {flag.replace("--[no-]", "--") for flag in re.findall(r"--[\w\[][\w\]-]*", page.read_text())}
    known = {spec.flag for spec in specs().values()}
    known |= {"--no-" + spec.flag[2:] for spec in specs().values() if spec.kind == "bool"}
    assert flags - known == set()
