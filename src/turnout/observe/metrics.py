"""Metrics of a run: metrics.jsonl, one row per train step, and the boards that show them elsewhere.

Owns the file and the names of the metrics that panel, plots and summary read. Promises: keys that begin with
`seconds/` are timings, those with `memory/` measured bytes; every other number is repeatable in deterministic
mode; a number that isn't finite is written as null and counted, never dropped silently.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, SupportsFloat, cast

from turnout.core.errors import DataError, Fault
from turnout.observe.append import append_line
from turnout.observe.boards import Board

REWARD = "rollout/reward_mean"
RESPONSE_LEN = "rollout/response_len_mean"
LAG = "rollout/lag_mean"
MISMATCH = "train/mismatch_mean_abs_logprob"
LENGTHS = ("rollout/response_len_min", RESPONSE_LEN, "rollout/response_len_max")
LAG_MAX = "rollout/lag_max"
EVAL_SCORE, EVAL_LOW, EVAL_HIGH = (
    "eval/score",
    "eval/low",
    "eval/high",
)  # of the first set, with its 95 % interval
SECONDS = "seconds/"
STEP_S, BUBBLE_S = SECONDS + "step", SECONDS + "bubble"  # of these the trainer had nothing to do
MEMORY = "memory/"
PHASES = ("rollout", "train", "publish", "prepare", "activate")

Row = dict[str, float | None]


class MetricsLog:
    """The writer. `nonfinite` counts the numbers that were not finite, by key."""

    def __init__(self, path: Path, boards: Sequence[Board] = (), behind: int | None = None) -> None:
        """`boards` get the finite numbers of each row, and are closed with the log. `behind`: the run goes on after
        so many steps; rows of later ones are taken out, since they will be written anew."""
        if behind is not None and path.exists():
            _rewind(path, behind)
        self._path, self._file = path, path.open("ab", buffering=0)
        self._boards = boards
        self.nonfinite: dict[str, int] = {}

    def write(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """One row: `step` is the number of train steps done. Raises LedgerError where the file can't be written."""
        row: Row = {}
        for key in sorted(values):
            number = float(values[key])
            if not math.isfinite(number):
                self.nonfinite[key] = self.nonfinite.get(key, 0) + 1
                row[key] = None
                continue
            row[key] = number
        append_line(
            self._file, self._path, json.dumps({"step": step, **row}, allow_nan=False).encode() + b"\n"
        )
        finite = {key: number for key, number in row.items() if number is not None}
        for board in self._boards:
            board.write(step, finite)

    def sync(self) -> None:
        """What was written is on stable storage after this."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        for board in self._boards:
            board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[tuple[int, Row]]:
    """All rows as (step, values). A torn last row is left out; any other bad row raises DataError."""
    rows: list[tuple[int, Row]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = cast("Row", json.loads(line))
            rows.append((int(cast("float", row.pop("step"))), row))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            place = f"{path}:{number}"
            raise DataError(Fault(place, "", f"no row of metrics: {error}", "was it edited?")) from None
    return rows


def repeatable(row: Row) -> Row:
    """The part of a row that must be equal when a deterministic run is repeated."""
    return {key: value for key, value in row.items() if not key.startswith((SECONDS, MEMORY))}


def _rewind(path: Path, steps: int) -> None:
    """Replaces the file by its rows of at most `steps` steps, at once."""
    kept = [json.dumps({"step": step, **row}) + "\n" for step, row in read_metrics(path) if step <= steps]
    own = path.with_name(f".{path.name}.{os.getpid()}")
    own.write_text("".join(kept), encoding="utf-8")
    own.replace(path)
