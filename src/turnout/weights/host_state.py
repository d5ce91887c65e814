"""The state file of a local checkpoint: which run and version its files are, and the digest of every tensor.

It lies in `.turnout/state.json` in the checkpoint's folder, where no loader of checkpoints looks, and is only ever
replaced whole. `beside` names the folder from which a full version is being moved into its place: which files still
lie there tells how far that came.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from turnout.core.errors import ConfigError, Fault
from turnout.core.version import WeightVersion
from turnout.weights.digest import Line

FORMAT, FORMAT_VERSION = "turnout-local", 1


@dataclass(frozen=True)
class LocalState:
    """`files` are the names that the version has in the folder; `step` its train step; `beside` is
    empty where no switch is under way."""

    run_id: str
    version: WeightVersion
    step: int
    beside: str
    files: tuple[str, ...]
    tensors: dict[str, Line]

    def to_bytes(self) -> bytes:
        return json.dumps({"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}).encode()


def read_state(path: Path) -> LocalState | None:
    """The state in a file, None where there is no file; raises ConfigError for anything else."""
    remedy = "give an empty folder: this one can't be trusted"
    try:
        row = json.loads(path.read_bytes())
        if (row.pop("format"), row.pop("format_version")) != (FORMAT, FORMAT_VERSION):
            raise ConfigError(Fault("--local-checkpoint", str(path), "is a state of another format", remedy))
        row["version"], row["files"] = WeightVersion(**row["version"]), tuple(row["files"])
        row["tensors"] = {n: (dtype, tuple(shape), d) for n, (dtype, shape, d) in row["tensors"].items()}
        return LocalState(**row)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        reason = f"cannot be read as the state of a local checkpoint: {fault}"
        raise ConfigError(Fault("--local-checkpoint", str(path), reason, remedy)) from fault
