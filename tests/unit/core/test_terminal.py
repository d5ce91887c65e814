"""Who gets colours."""

from __future__ import annotations

import pytest

from turnout.core.terminal import BOLD, has_colors, painted


@pytest.mark.parametrize(
    ("is_terminal", "environment", "expected"),
    [
        (True, {"TERM": "xterm"}, True),
        (False, {"TERM": "xterm"}, False),
        (True, {"TERM": "dumb"}, False),
        (True, {}, False),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "xterm", "NO_COLOR": ""}, True),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {"FORCE_COLOR": "0"}, False),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_who_gets_colours(is_terminal, environment, expected):
    assert has_colors(is_terminal, environment) == expected


def test_painted():
    assert painted("a", BOLD, True) == "\x1b[1ma\x1b[0m"
    assert painted("a", BOLD, False) == "a" and painted("", BOLD, True) == ""
