"""Metrics of a run: metrics.jsonl, one row per train step, and TensorBoard where it is asked for.

Owns both sinks and the names of the metrics that panel, plots and summary read. Promises: keys that begin with
`seconds/` are timings, those with `memory/` measured bytes; every other number is repeatable in deterministic
mode; a number that isn't finite is written as null and counted, never dropped silently.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsFloat, cast

from turnout.core.errors import DataError, Fault
from turnout.observe.append import append_line

REWARD = "rollout/reward_mean"
RESPONSE_LEN = "rollout/response_len_mean"
LAG = "rollout/lag_mean"
MISMATCH = "train/mismatch_mean_abs_logprob"
EVAL_SCORE = "eval/score"
SECONDS = "seconds/"
MEMORY = "memory/"
PHASES = ("rollout", "train", "publish", "prepare", "activate")

Row = dict[str, float | None]


class MetricsLog:
    """The writer. `nonfinite` counts the numbers that were not finite, by key."""

    def __init__(self, path: Path, tensorboard: Path | None = None, behind: int | None = None) -> None:
        """`tensorboard` is the folder for TensorBoard's files, None for none. `behind`: the run goes on after so
        many steps; rows of later ones are taken out, as TensorBoard is told to, since they will be written anew."""
        if behind is not None and path.exists():
            _rewind(path, behind)
        self._path, self._file = path, path.open("ab", buffering=0)
        self._board = None if tensorboard is None else _board(tensorboard, behind)
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
            if self._board is not None:
                self._board.add_scalar(key, number, step)
        append_line(
            self._file, self._path, json.dumps({"step": step, **row}, allow_nan=False).encode() + b"\n"
        )
        if self._board is not None:
            self._board.flush()

    def sync(self) -> None:
        """What was written is on stable storage after this."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

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


def _board(folder: Path, behind: int | None) -> Any:
    from tensorboardX import SummaryWriter  # noqa: PLC0415  late: it takes half a second

    return SummaryWriter(str(folder), purge_step=None if behind is None else behind + 1)
