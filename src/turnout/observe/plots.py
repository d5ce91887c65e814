"""PNG plots of a run: one file with all curves, and each curve in a file of its own.

Reads rows of metrics (see `metrics`); a curve without a number is left out. matplotlib is imported when plots
are made, draws into memory (no display), and its global state is not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from turnout.observe.metrics import (
    BUBBLE_S,
    EVAL_HIGH,
    EVAL_LOW,
    EVAL_SCORE,
    LAG,
    LAG_MAX,
    LENGTHS,
    MISMATCH,
    PHASES,
    RESPONSE_LEN,
    REWARD,
    SECONDS,
    STEP_S,
    Row,
)

Rows = Sequence[tuple[int, Row]]
INK, GRID = "#333333", "#dddddd"
COLORS = {
    "reward": "#2a9d4a",
    "eval": "#2660a4",
    "length": "#8a5a00",
    "lag": "#9b5de5",
    "bubble": "#c2571a",
    "mismatch": "#b3261e",
}
PHASE_COLORS = ("#3aa6b9", "#9b5de5", "#f0b429", "#4caf50", "#b3261e")
MISMATCH_BOUND = 0.08


def write_plots(rows: Rows, folder: Path, title: str) -> list[Path]:
    """Writes `plots.png` and one file per curve into `folder`; the paths, none where there is nothing to plot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  late: it takes a second
    from matplotlib.figure import Figure  # noqa: PLC0415

    curves = [(name, draw) for name, needed, draw in CURVES if any(_has(rows, key) for key in needed)]
    if not curves:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "plots.png", *(folder / f"{name}.png" for name, _ in curves)]
    lines = (len(curves) + 1) // 2
    columns = min(2, len(curves))
    whole = Figure(figsize=(6.2 * columns, 3.4 * lines + 0.5), layout="constrained")
    whole.suptitle(title, color=INK, fontsize=13, x=0.01, ha="left", fontweight="bold")
    for at, (_, draw) in enumerate(curves):
        _draw(whole.add_subplot(lines, columns, at + 1), draw, rows)
    figures = [whole]
    for _, draw in curves:
        single = Figure(figsize=(6.4, 3.8), layout="constrained")
        _draw(single.add_subplot(), draw, rows)
        figures.append(single)
    for path, figure in zip(paths, figures):
        FigureCanvasAgg(figure).print_png(path)
    return paths


def _draw(axes: Any, draw: Callable[[Any, Rows], None], rows: Rows) -> None:
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    draw(axes, rows)
    axes.set_xlabel("train step", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)
    labels = axes.get_legend_handles_labels()[1]
    if labels:
        many = len(labels) > 2  # in one line above the bars
        place = "upper left" if many else "best"
        axes.legend(frameon=False, fontsize=9, labelcolor=INK, loc=place, ncols=len(labels) if many else 1)


def _reward(axes: Any, rows: Rows) -> None:
    axes.set_title("Reward", loc="left", color=INK)
    steps, values = _series(rows, REWARD)
    axes.plot(steps, values, color=COLORS["reward"], alpha=0.35, linewidth=1.2)
    axes.plot(steps, _smooth(values), color=COLORS["reward"], linewidth=2.2, label="rollout, mean of 5 steps")
    steps, values = _series(rows, EVAL_SCORE)
    axes.vlines(*_between(rows, EVAL_LOW, EVAL_HIGH), color=COLORS["eval"], alpha=0.35, linewidth=4)
    axes.plot(steps, values, color=COLORS["eval"], marker="o", linewidth=1.4, label="held-out prompts, 95 %")


def _length(axes: Any, rows: Rows) -> None:
    axes.set_title("Response length (tokens: least, mean, most)", loc="left", color=INK)
    band = _between(rows, LENGTHS[0], LENGTHS[-1])
    axes.fill_between(*band, color=COLORS["length"], alpha=0.15, linewidth=0)
    axes.plot(*_series(rows, RESPONSE_LEN), color=COLORS["length"], linewidth=2)
    axes.set_ylim(bottom=0)


def _lag(axes: Any, rows: Rows) -> None:
    axes.set_title("Age of trained tokens (train steps)", loc="left", color=INK)
    axes.plot(*_series(rows, LAG_MAX), color=COLORS["lag"], linewidth=1.2, linestyle=":", label="oldest")
    axes.plot(*_series(rows, LAG), color=COLORS["lag"], linewidth=2, label="mean")
    axes.set_ylim(bottom=0)


def _bubble(axes: Any, rows: Rows) -> None:
    axes.set_title("Bubble (share of a step in which the trainer waits)", loc="left", color=INK)
    found = [
        (step, bubble / whole)
        for step, row in rows
        if (bubble := row.get(BUBBLE_S)) is not None and (whole := row.get(STEP_S))
    ]
    axes.plot([step for step, _ in found], [share for _, share in found], color=COLORS["bubble"], linewidth=2)
    axes.set_ylim(0, 1)


def _between(rows: Rows, low: str, high: str) -> tuple[list[int], list[float], list[float]]:
    """Steps, lower and upper numbers of the rows that have both."""
    found = [
        (step, least, most)
        for step, row in rows
        if (least := row.get(low)) is not None and (most := row.get(high)) is not None
    ]
    return [step for step, _, _ in found], [least for _, least, _ in found], [most for _, _, most in found]


def _phases(axes: Any, rows: Rows) -> None:
    axes.set_title("Seconds per step", loc="left", color=INK)
    named = [name for name in PHASES if _has(rows, SECONDS + name)]
    chosen = [(step, row) for step, row in rows if any(row.get(SECONDS + name) is not None for name in named)]
    floor = [0.0] * len(chosen)
    for name, color in zip(named, PHASE_COLORS):
        heights = [
            row.get(SECONDS + name) or 0.0 for _, row in chosen
        ]  # a phase that didn't run took no time
        axes.bar([step for step, _ in chosen], heights, bottom=floor, color=color, label=name, width=0.85)
        floor = [below + height for below, height in zip(floor, heights)]
    axes.margins(y=0.25)  # room for the legend


def _mismatch(axes: Any, rows: Rows) -> None:
    axes.set_title("Mismatch of engine and trainer (mean |log-prob difference|)", loc="left", color=INK)
    axes.plot(*_series(rows, MISMATCH), color=COLORS["mismatch"], linewidth=2)
    axes.axhline(MISMATCH_BOUND, color=INK, linewidth=1, linestyle=":", label=f"bound {MISMATCH_BOUND}")
    axes.set_ylim(bottom=0)


def _series(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    found = [(step, value) for step, row in rows if (value := row.get(key)) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _has(rows: Rows, key: str) -> bool:
    return any(row.get(key) is not None for _, row in rows)


def _smooth(values: list[float], window: int = 5) -> list[float]:
    """The mean of each value and up to `window` - 1 before it."""
    return [
        sum(part) / len(part)
        for at in range(len(values))
        if (part := values[max(0, at + 1 - window) : at + 1])
    ]


CURVES: tuple[tuple[str, tuple[str, ...], Callable[[Any, Rows], None]], ...] = (
    ("reward", (REWARD, EVAL_SCORE), _reward),
    ("length", (RESPONSE_LEN,), _length),
    ("lag", (LAG,), _lag),
    ("phases", tuple(SECONDS + name for name in PHASES), _phases),
    ("bubble", (BUBBLE_S,), _bubble),
    ("mismatch", (MISMATCH,), _mismatch),
)
