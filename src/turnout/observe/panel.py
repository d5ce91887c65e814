"""The live panel of a run on a terminal, or one plain line per step elsewhere.

Owns the terminal's lines while it is open. Promises: `update` returns at once and never raises into the run; the
terminal is redrawn at most 4 times a second, by a thread of rich's, and follows a change of its size; what other
code prints appears above the panel.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from dataclasses import replace
from types import TracebackType
from typing import Literal, Self, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from turnout.core.ports import Clock
from turnout.observe.panel_render import render
from turnout.observe.run_view import RunView, plain_line

REFRESHES_PER_SECOND = 4
Mode = Literal["auto", "on", "off"]


class PipedConsole(Console):
    """rich's, which would end the process where the reader of its stream has gone."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Panel:
    """Opened with the run, updated as it goes, closed at its end. `live` tells whether it draws."""

    def __init__(self, mode: Mode, clock: Clock, stream: TextIO | None = None) -> None:
        self._clock = clock
        self._stream = stream or sys.stdout or io.StringIO()  # `>&-` makes it None
        terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self.live = mode == "on" or (mode == "auto" and terminal)
        self.console = PipedConsole(file=self._stream, force_terminal=True if self.live else None)
        self._display: Live | None = None
        self._view: RunView | None = None
        self._updated_at = 0.0
        self._told_step = 0

    def update(self, view: RunView) -> None:
        """Shows `view` from now on; without a terminal prints a line when its step is a new one."""
        self._view, self._updated_at = view, self._clock.now()
        if not self.live and view.step > self._told_step:
            self._told_step = view.step
            self.say(plain_line(view))

    def say(self, text: str) -> None:
        """Prints a line, above the panel where there is one. A stream that has gone is no fault of the run."""
        with contextlib.suppress(OSError, ValueError):
            if self.live:
                self.console.print(Text(text))
            else:
                self._stream.write(text + "\n")
                self._stream.flush()

    def open(self) -> None:
        if self.live:
            self._display = Live(
                get_renderable=self._drawn,
                console=self.console,
                refresh_per_second=REFRESHES_PER_SECOND,
                vertical_overflow="crop",
            )
            with contextlib.suppress(OSError, ValueError):
                self._display.start(refresh=True)

    def close(self) -> None:
        """Leaves the last picture on the terminal. May be called twice."""
        display, self._display = self._display, None
        if display is not None:
            with contextlib.suppress(OSError, ValueError):
                display.stop()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drawn(self) -> RenderableType:
        view = self._view
        if view is None:
            return Text("starting ...", style="dim")
        try:
            since = self._clock.now() - self._updated_at
            ticking = replace(view, seconds_elapsed=view.seconds_elapsed + since)
            return render(ticking, self.console.width, not self.console.encoding.startswith("utf"))
        except Exception as error:  # noqa: BLE001  a fault of the picture must not end a run
            return Text(f"the panel can't be drawn: {type(error).__name__}: {error}", style="red")
