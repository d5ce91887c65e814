"""The panel, its picture and the plain lines."""

from __future__ import annotations

import io
import math
import os
import pty
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from turnout.observe import panel as panel_module
from turnout.observe.panel import Panel
from turnout.observe.panel_render import render
from turnout.observe.run_view import EngineView, RunView, VersionView, duration, plain_line, size, sparkline

LABEL = "v000012-9f3ac01be2d47788"
VIEW = RunView(
    "quick",
    12,
    40,
    "train",
    LABEL,
    (0.1, 0.2, 0.4),
    ((0, 0.0), (10, 0.25)),
    412.3,
    8.4,
    0.0123,
    (("rollout", 2.9), ("train", 3.6)),
    (EngineView("engine-0", "ready", LABEL), EngineView("engine-1", "dead", "v000011-aaaaaaaaaaaaaaaa")),
    62.0,
    2.0,
    VersionView(6330, 0.0123, "packed"),
    buffer=(3, 2, 8),
)


class Clock:
    time = 0.0

    def now(self):
        return self.time


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def drawn(view: RunView, width: int, ascii_only: bool = False) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(render(view, width, ascii_only))
    return console.export_text()


@pytest.mark.parametrize("width", [200, 110, 84, 72, 50])
def test_everything_is_in_the_picture_and_nothing_overflows(width):
    text = drawn(VIEW, width)
    for part in (
        "quick",
        "12/40",
        "0.400",
        "0.250",
        "412",
        "8.4",
        "0.0123",
        "2.90 s",
        "6.3 kB",
        "packed, 1.2 %",
        "3 in flight",
        "engine-1",
        LABEL,
        "1:02",
        "0:56",
    ):
        assert part in text, part
    assert all(len(line) <= width for line in text.splitlines())


def test_the_line_of_waits_is_shown_whole():
    line = "run -> rollout -> group g00000012.0 -> engine engine-1: a token, for 31 s of at most 600 s"
    for width in (110, 60):
        words = drawn(replace(VIEW, waits=line, stalled=True), width).replace("│", " ").split()
        assert " ".join(words).find(line) > 0


@given(width=st.integers(1, 130), ascii_only=st.booleans(), known=st.booleans())
def test_any_width_can_be_drawn(width, ascii_only, known):
    assert drawn(VIEW if known else RunView("x"), width, ascii_only)


def test_without_utf8_the_picture_is_ascii():
    for width in (110, 70, 40):
        assert drawn(VIEW, width, True).isascii()


def test_numbers_that_are_not_known_or_not_finite_are_dashes():
    odd = replace(VIEW, rewards=(math.nan, math.inf), mismatch=math.nan, tokens_per_second=None, steps=None)
    text = drawn(odd, 100)
    assert "step 12" in text and "nan" not in text and "inf" not in text and "best" not in text
    assert "best 0.500" in drawn(replace(odd, rewards=(0.5, math.nan)), 100)
    assert plain_line(RunView("x", 1)).startswith("step 1 | reward - | len - | - tok/s")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (269_000_000, "269 MB"), (10**16, "10000 TB")],
)
def test_sizes(count, text):
    assert size(count) == text


def test_plain_line():
    assert plain_line(VIEW) == (
        "step 12/40 | reward 0.400 | eval 0.250 | len 8.4 | 412 tok/s | mismatch 0.0123 | "
        f"rollout 2.9s train 3.6s | {LABEL} 6.3 kB | 1:02 elapsed, 0:56 left"
    )


def test_the_age_of_tokens_is_shown_where_there_is_any():
    old = replace(VIEW, lag=(0.834, 2))
    assert "lag            0.83  mean steps, at most 2" in drawn(old, 100)
    assert " | mismatch 0.0123 | lag 0.83, at most 2 | " in plain_line(old)
    for young in (VIEW, replace(VIEW, lag=(0.0, 0))):
        assert "lag" not in plain_line(young) and "at most" not in drawn(young, 100)


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([], 5, ""),
        ([1.0], 0, ""),
        ([1.0, 1.0], 5, "▄▄"),
        ([0.0, 1.0], 5, "▁█"),
        ([0.0, math.nan, 1.0], 5, "▁ █"),
        ([math.nan], 5, " "),
        ([0.0] * 50 + [1.0] * 50, 4, "▁▁██"),
    ],
)
def test_sparkline(values, width, line):
    assert sparkline(values, width) == line


@given(st.lists(st.floats(-1e6, 1e6), max_size=300), st.integers(1, 60))
def test_sparkline_fits(values, width):
    assert len(sparkline(values, width)) == min(len(values), width)


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0, "0:00"), (65, "1:05"), (7384, "2:03:04"), (math.inf, "-")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_without_a_terminal_there_is_one_line_per_step():
    stream = io.StringIO()
    with Panel("auto", Clock(), stream) as panel:
        assert not panel.live
        for step in (1, 1, 2):
            panel.update(replace(VIEW, step=step))
        panel.say("note")
    assert [line.split(" |")[0] for line in stream.getvalue().splitlines()] == [
        "step 1/40",
        "step 2/40",
        "note",
    ]


def test_modes(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert Panel("auto", Clock(), Terminal()).live
    assert not Panel("off", Clock(), Terminal()).live
    assert Panel("on", Clock(), io.StringIO()).live
    monkeypatch.setenv("TERM", "dumb")
    assert not Panel("auto", Clock(), Terminal()).live


def test_a_terminal_gets_the_picture_and_lines_above_it(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    clock = Clock()
    with Panel("auto", clock, stream) as panel:
        panel.update(VIEW)
        clock.time = 10.0  # time goes on between updates
        panel.say("a note")
    text = stream.getvalue()
    assert "a note" in text and "engine-0" in text and "1:12" in text
    panel.close()


def test_a_real_pseudo_terminal_can_shrink_under_the_panel(monkeypatch):
    import fcntl
    import struct
    import termios

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("LINES", raising=False)
    owner, child = pty.openpty()
    widths = []
    with os.fdopen(child, "w") as stream:

        def size(columns):
            fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

        size(120)
        panel = Panel("auto", Clock(), stream)
        # rich asks descriptors 0 to 2 for the size; those are the test runner's, so ask this one instead
        monkeypatch.setattr("os.get_terminal_size", lambda _=0, ask=os.get_terminal_size: ask(child))
        panel.update(VIEW)
        for columns in (120, 60):
            size(columns)
            picture = panel._drawn()
            widths.append(getattr(picture, "width", None))
    os.close(owner)
    assert widths == [110, 60]


def test_a_fault_of_the_picture_does_not_end_the_run(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")

    def broken(*_):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(panel_module, "render", broken)
    stream = Terminal()
    with Panel("auto", Clock(), stream) as panel:
        panel.update(VIEW)
    assert "can't be drawn: ZeroDivisionError: oops" in stream.getvalue()


def test_a_closed_stream_does_not_end_the_run():
    stream = io.StringIO()
    panel = Panel("off", Clock(), stream)
    stream.close()
    with panel:
        panel.update(VIEW)


def test_the_panel_says_where_the_dashboard_is():
    assert "turnout dash runs/quick-001" in drawn(replace(VIEW, run_dir="runs/quick-001"), 110)
    assert "turnout dash" not in drawn(VIEW, 110)


def test_the_buffer_shares_its_slots_and_is_left_out_where_there_is_none():
    rows = [line for line in drawn(VIEW, 80).split("\n") if "buffer" in line]
    assert len(rows) == 1 and "2/8" in rows[0]
    assert rows[0].count("━") == round(39 * 2 / 8) + round(39 * 3 / 8)  # of what stands left of "3 in flight"
    assert "buffer" not in drawn(replace(VIEW, buffer=None), 80)
    assert "in flight" in drawn(
        replace(VIEW, buffer=(900, 900, 8)), 80
    )  # more than slots: a resume brought them


def test_a_reader_that_goes_does_not_end_the_run():
    """rich alone would raise SystemExit."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        panel = Panel("on", Clock(), stream)
        with panel:
            panel.update(VIEW)
            panel.say("a line")
        with pytest.raises(BrokenPipeError):
            panel.console.print("another")
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # for what is flushed as it is closed
