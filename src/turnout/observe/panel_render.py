"""The panel's picture: a RunView and a width -> something rich can print. Pure."""

from __future__ import annotations

import math

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel as Frame
from rich.table import Table
from rich.text import Text

from turnout.observe.run_view import ASCII_BLOCKS, BLOCKS, RunView, duration, number, size, sparkline

WIDEST = 110
TWO_COLUMNS = 84
PHASE_COLORS = {
    "rollout": "cyan",
    "train": "magenta",
    "publish": "yellow",
    "prepare": "blue",
    "activate": "green",
}
STATE_COLORS = {
    "ready": "green",
    "updating": "yellow",
    "paused": "yellow",
    "starting": "yellow",
    "fenced": "red",
    "dead": "red",
}


def render(view: RunView, width: int, ascii_only: bool = False) -> RenderableType:
    """The whole panel for a terminal of `width` columns."""
    inner = min(width, WIDEST) - 6
    wide = inner >= TWO_COLUMNS - 6
    half = (inner - 4) // 2 if wide else inner
    curves, machines = _curves(view, half, ascii_only), _machines(view, half, ascii_only)
    body = Columns([curves, machines], padding=(0, 4)) if wide else Group(curves, Text(), machines)
    title = Text.assemble(
        (" turnout ", "bold"), ("· " if not ascii_only else "- ", "dim"), (f"{view.run_name} ", "cyan")
    )
    return Frame(
        Group(_progress(view, inner, ascii_only), _waits(view), body),
        title=title,
        title_align="left",
        subtitle=Text(f" turnout dash {view.run_dir} ", "dim") if view.run_dir else None,
        subtitle_align="left",
        box=box.ASCII if ascii_only else box.ROUNDED,
        border_style="dim",
        padding=(0, 2),
        width=min(width, WIDEST),
    )


def _progress(view: RunView, width: int, ascii_only: bool) -> RenderableType:
    of = f"/{view.steps}" if view.steps is not None else ""
    left = Text.assemble("step ", (f"{view.step}{of}", "bold"))
    right = Text.assemble(
        (view.phase, PHASE_COLORS.get(view.phase, "white")),
        ("  elapsed ", "dim"),
        duration(view.seconds_elapsed),
        ("  left ", "dim"),
        duration(view.seconds_left),
    )
    row = Table.grid(padding=(0, 2, 0, 0))
    room = max(8, width - left.cell_len - right.cell_len - 6)
    done = 0 if not view.steps else round(room * min(1.0, view.step / view.steps))
    full, rest = ("#", ".") if ascii_only else ("━", "─")
    bar = Text.assemble((full * done, "green"), (rest * (room - done), "dim"))
    row.add_row(left, bar, right)
    return row


def _waits(view: RunView) -> RenderableType:
    """Who waits for whom: the end of the line is its root, so that the start of a long one goes."""
    return Text(view.waits, "bold red" if view.stalled else "dim")


def _curves(view: RunView, width: int, ascii_only: bool) -> RenderableType:
    blocks = ASCII_BLOCKS if ascii_only else BLOCKS
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", width=9)
    table.add_column(justify="right", width=8)
    table.add_column(width=max(4, width - 23), no_wrap=True, overflow="crop")
    reward = view.rewards[-1] if view.rewards else None
    table.add_row(
        "reward",
        Text(number(reward, 3), "bold green"),
        Text(sparkline(view.rewards, width - 23, blocks), "green"),
    )
    finite = [value for value in view.rewards if math.isfinite(value)]
    if finite:
        arrow = "->" if ascii_only else "→"
        table.add_row("", "", Text(f"{finite[0]:.3f} {arrow} best {max(finite):.3f}", "dim"))
    scores = [score for _, score in view.evals]
    told = f"at step {view.evals[-1][0]}" if view.evals else ""
    line = Text.assemble((sparkline(scores, max(4, width - 36), blocks), "blue"), (f" {told}", "dim"))
    table.add_row("eval", Text(number(scores[-1] if scores else None, 3), "bold blue"), line)
    table.add_row("tokens/s", number(view.tokens_per_second, 0), Text("trained, of the whole step", "dim"))
    table.add_row("length", number(view.response_len, 1), Text("mean tokens a response", "dim"))
    if view.lag is not None and view.lag[1]:
        table.add_row("lag", number(view.lag[0], 2), Text(f"mean steps, at most {view.lag[1]}", "dim"))
    if view.buffer is not None:
        table.add_row("buffer", *_buffer(view.buffer, max(4, width - 23), ascii_only))
    mismatch_style = "bold red" if view.mismatch is not None and view.mismatch > 0.08 else ""
    table.add_row(
        "mismatch", Text(number(view.mismatch, 4), mismatch_style), Text("mean |log-prob diff|", "dim")
    )
    return table


def _buffer(held: tuple[int, int, int], width: int, ascii_only: bool) -> tuple[str, Text]:
    """Complete groups of so many slots; how those, what is in flight and the rest share them."""
    flying, complete, slots = held
    told = f" {flying} in flight"
    room = max(0, width - len(told))
    done = min(room, round(room * complete / max(1, slots)))
    more = min(room - done, round(room * flying / max(1, slots)))
    full, rest = ("#", ".") if ascii_only else ("━", "─")
    bar = (full * done, "green"), (full * more, "cyan"), (rest * (room - done - more), "dim")
    return f"{complete}/{slots}", Text.assemble(*bar, (told, "dim"))


def _machines(view: RunView, width: int, ascii_only: bool) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", width=9)
    table.add_column(justify="right", width=8)
    room = max(4, width - 23)
    table.add_column(width=room, no_wrap=True, overflow="crop")
    longest = max((seconds for _, seconds in view.phase_seconds), default=0.0)
    for name, seconds in view.phase_seconds:
        filled = 0 if longest <= 0 else max(1, round(seconds / longest * room))
        bar = Text(("#" if ascii_only else "━") * filled, PHASE_COLORS.get(name, "white"))
        table.add_row(name, f"{seconds:.2f} s", bar)
    if view.published is not None:
        table.add_row("version", size(view.published.bytes), Text(view.published.text, "dim"))
    if view.phase_seconds:
        table.add_row("", "", "")
    engines = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        engines.add_column(overflow="crop", no_wrap=True)
    dot = "*" if ascii_only else "●"
    for engine in view.engines[:8]:
        state = Text(f"{dot} {engine.state}", STATE_COLORS.get(engine.state, "white"))
        current = engine.version == view.version
        engines.add_row(engine.engine_id, state, Text(engine.version, "green" if current else "yellow"))
    if len(view.engines) > 8:
        engines.add_row(Text(f"and {len(view.engines) - 8} more", "dim"))
    return Group(table, engines)
