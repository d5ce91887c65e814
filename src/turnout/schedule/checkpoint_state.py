"""state.json of a checkpoint, and which checkpoint a run goes on from.

state.json names every other file of its folder with its size: a folder where one is missing, or has another size,
is no checkpoint. Promises: the newest complete one of this run is taken, by number and not by name; every folder
that was passed over is named with the reason; where there are checkpoints and none is complete the run does not
begin anew, it ends with what is missing.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from turnout.core.errors import ConfigError, Fault
from turnout.core.ports import Store
from turnout.core.version import WeightVersion

FORMAT = 2
STATE, LEDGER = "state.json", "ledger.sqlite"
FOLDER = re.compile(r"step_(\d{6,})")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointState:
    """Where a run stood after `step` train steps, besides trainer and ledger. `position` is the next ordinal of the
    source, in `epoch`; `version` the committed version of these weights; `data` the digest of the prompts."""

    run_id: str
    incarnation: int
    step: int
    position: int
    epoch: int
    version: WeightVersion
    data: str


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    state: CheckpointState


def write_state(folder: Path, state: CheckpointState) -> None:
    """The last file of a checkpoint: what all others are."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    text = json.dumps({"format": FORMAT, **asdict(state), "files": files}, indent=1)
    (folder / STATE).write_text(text, encoding="utf-8")


def read_state(folder: Path) -> CheckpointState:
    """Raises ValueError that says what is missing or wrong."""
    try:
        row: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if (found := row.pop("format")) != FORMAT:
            raise ValueError(f"{STATE} is of format {found}, not {FORMAT}")
        files: dict[str, int] = row.pop("files")
        row["version"] = WeightVersion(**row["version"])
        state = CheckpointState(**row)
    except FileNotFoundError:
        raise ValueError(f"{STATE} is missing") from None
    except (KeyError, TypeError, AttributeError) as fault:
        raise ValueError(f"{STATE} is not the state of a run: {fault!r}") from None
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        if path.stat().st_size != size:
            raise ValueError(f"{name} has {path.stat().st_size} bytes, not {size}")
    return state


def newest_checkpoint(folder: Path, run_id: str, files: Store) -> Checkpoint | None:
    """The newest complete checkpoint of the run; None where there is none at all, so that the run begins at step 0.
    Raises ConfigError where there are some, but none is good."""
    passed: list[Fault] = []
    for path in _newest_first(folder, files):
        try:
            state = read_state(path)
            if state.run_id != run_id:
                raise ValueError(f"belongs to run {state.run_id}")
        except ValueError as fault:
            log.warning("checkpoint %s is passed over: %s", path, fault)
            passed.append(
                Fault(str(path), "", str(fault), "restore it, or remove the folder to do without it")
            )
            continue
        return Checkpoint(path, state)
    if passed:
        raise ConfigError(passed)
    return None


def _newest_first(folder: Path, files: Store) -> Iterator[Path]:
    names = [name for name in files.names(folder) if FOLDER.fullmatch(name)]
    for name in sorted(names, key=step_of, reverse=True):
        yield folder / name


def step_of(name: str) -> int:
    """The train steps done of a checkpoint's folder, by its name."""
    return int(name.split("_")[1])
