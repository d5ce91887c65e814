"""The documentation builds as a site, strictly: no link or anchor leads nowhere; and nothing in it is fetched."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

ROOT = Path(__file__).parents[2]


def test_the_site_builds_and_fetches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    monkeypatch.chdir(ROOT)
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    pages = {
        path.relative_to(tmp_path).as_posix(): path.read_text("utf-8") for path in tmp_path.rglob("*.html")
    }
    assert {"index.html", "index.zh.html", "tour.html", "flags.html", "guides/async.html"} <= set(pages)
    fetched = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"(?:https?:)?//[^\"]*")
    assert {name: found for name, text in pages.items() if (found := fetched.findall(text))} == {}
    assert (tmp_path / "search" / "search_index.json").is_file()
    assert (tmp_path / "files" / "examples" / "own_algorithm.py").is_file()
