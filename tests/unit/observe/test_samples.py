"""Completions on the terminal: safe, cut, readable."""

from __future__ import annotations

import io
import unicodedata

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from turnout.observe.samples import SampleRow, print_samples, safe_text

ROWS = [
    SampleRow("2+3?", "5", "I think\n\x1b[2J\x1b]0;title\x07 it is [red]6[/red]", "5", 0.0, 1.0),
    SampleRow("x" * 1000, "y", None, "a\u202eb\x9bc"),
]


@given(st.text(max_size=400), st.integers(0, 50))
def test_no_control_character_gets_through(text, limit):
    shown = safe_text(text, limit)
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    shown.encode("utf-8")


def test_cut_texts_say_by_how_much():
    assert safe_text("abcdef", 4) == "abcd … 2 more characters"
    assert safe_text("abcd", 4) == "abcd"
    assert safe_text("a\nb\x1b[0m") == "a↵b\\x1b[0m"


def printed(terminal: bool, width: int = 100) -> str:
    stream = io.StringIO()
    print_samples(ROWS, Console(file=stream, width=width, force_terminal=terminal, color_system=None))
    return stream.getvalue()


def test_a_table_on_a_terminal():
    text = printed(True)
    for part in ("2+3?", "\\x1b[2J", "[red]6[/red]", "reward 1.00", "\\u202eb\\x9bc", "more characters"):
        assert part in text.replace("│", " ") or part in "".join(text.split()), part
    assert "\x1b[2J" not in text and "\x07" not in text and "\u202e" not in text


def test_lines_elsewhere():
    text = printed(False)
    assert "  before  I think↵\\x1b[2J\\x1b]0;title\\x07 it is [red]6[/red] [reward 0.00]\n" in text
    assert "  before  -\n" in text and "\x1b" not in text
    assert all(len(line) < 320 for line in text.splitlines())


def test_nothing_to_show():
    stream = io.StringIO()
    print_samples([], Console(file=stream))
    assert stream.getvalue() == ""
