"""Where the numbers of a run are shown besides its own files: TensorBoard, Weights & Biases.

Promises: a board that fails once it shows a run is told of once and left out; it never ends the run (Guarded).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from turnout.core.errors import ConfigError, Fault
from turnout.observe.event_file import EventFile

log = logging.getLogger(__name__)
INIT_S = 30.0
STEP = "step"  # the axis of W&B's charts: its own step only grows, a resumed run's goes back


class Board(Protocol):
    """Gets the finite numbers of each row of metrics."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Guarded:
    """A board that fails under `name`, and not the run."""

    def __init__(self, board: Board, name: str) -> None:
        self._board, self._name, self._failed = board, name, False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if not self._failed:
            self._try(lambda: self._board.write(step, values))

    def close(self) -> None:
        self._try(self._board.close)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as fault:  # noqa: BLE001  whatever it is that such a package raises
            if not self._failed:
                log.warning("%s gets no more of this run: %s", self._name, fault or type(fault).__name__)
            self._failed = True


class TensorBoard:
    """Files in a folder. `behind`: the run goes on after so many steps; what it holds of later ones is purged."""

    def __init__(self, folder: Path, behind: int | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = EventFile(folder)
        if behind is not None:
            self._file.begins_at(behind + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._file.scalars(step, values)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class WandbPlan:
    """Names as W&B has them; None: its own default. `mode` None: online, and offline where that can't be had.
    `run_id` keeps the incarnations of a run together; `config` is shown beside the charts."""

    run_id: str
    name: str
    folder: Path
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    mode: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])


class WandbBoard:
    """One run of W&B."""

    def __init__(self, plan: WandbPlan) -> None:
        """Raises ConfigError where the package is missing, or what was asked for can't be had."""
        try:
            import wandb  # pyright: ignore[reportMissingImports]  # noqa: PLC0415  optional, and slow to import
        except ImportError:
            remedy = "`pip install wandb`, or leave it out"
            raise ConfigError(
                Fault("--use-wandb", "", "the package wandb is not installed", remedy)
            ) from None
        plan.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = _begin(wandb, plan, plan.mode)
        except wandb.errors.Error as fault:
            if plan.mode is not None:
                reason = f"W&B says: {fault}"
                raise ConfigError(
                    Fault("--wandb-mode", plan.mode, reason, "give offline, or log in")
                ) from fault
            log.warning("W&B can't be had online (%s): kept in %s for `wandb sync`", fault, plan.folder)
            wandb.teardown()  # its service holds the id of the run that did not begin
            self._run = _begin(wandb, plan, "offline")
        self._run.define_metric("*", step_metric=STEP)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, STEP: step})

    def close(self) -> None:
        self._run.finish()


def _begin(wandb: Any, plan: WandbPlan, mode: str | None) -> Any:
    return wandb.init(
        project=plan.project,
        entity=plan.entity,
        group=plan.group,
        name=plan.name,
        id=plan.run_id,
        resume="allow",
        dir=str(plan.folder),
        mode=mode,
        config=dict(plan.config),
        settings=wandb.Settings(console="off", init_timeout=INIT_S),  # the terminal is the panel's
    )
