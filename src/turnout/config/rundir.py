"""Where a run writes: the making of its directory, and the places of the files in it.

Owns the names of the files. Promises: a numbered run directory is made by exactly one run, also when two start at
once; a directory that holds a run is gone on with only where --run-dir names it and --resume allows it.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

from turnout.config.run_config import RunConfig
from turnout.core.errors import ConfigError, Fault

MAX_RUNS = 1000
LEDGER = "ledger.sqlite"
RECORD = "run.json"


@dataclass(frozen=True)
class RunPaths:
    """The files of a run. `weights` and `checkpoints` may lie elsewhere (--update-weight-disk-dir, where that is a
    folder; --save). `resumed`: the directory holds a run already, which goes on."""

    root: Path
    weights: Path
    checkpoints: Path
    resumed: bool = False

    @property
    def shown(self) -> str:
        """The run's directory as one would type it here."""
        here = Path.cwd()
        return str(self.root.relative_to(here) if self.root.is_relative_to(here) else self.root)

    @property
    def record(self) -> Path:
        """Whose directory it is (turnout.schedule.run_record); a directory with this file holds a run."""
        return self.root / RECORD

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def ledger(self) -> Path:
        """The file itself: with --ledger-dir the name in the run's directory is a link to it."""
        return (self.root / LEDGER).resolve()

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def waits(self) -> Path:
        """What the run waits for (turnout.schedule.stall_watch)."""
        return self.root / "waits.json"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def trace(self) -> Path:
        """The timeline for Perfetto."""
        return self.root / "trace.json"

    @property
    def plots(self) -> Path:
        return self.root / "plots"

    @property
    def trainer(self) -> Path:
        """Logs of the trainer's ranks, where it has several."""
        return self.root / "trainer"

    @property
    def engines(self) -> Path:
        """Logs and ready files of the engines."""
        return self.root / "engines"


def make_run_dir(config: RunConfig, base: Path = Path("runs")) -> RunPaths:
    """Makes the run's directory: --run-dir, which may hold a run that goes on, else `base`/NAME-NNN with the first
    number that is free. Raises ConfigError."""
    root = _numbered(config.run_name or "run", base) if config.run_dir is None else _expanded(config.run_dir)
    weights, saves = config.weight_folder, config.save
    paths = RunPaths(
        root.absolute(),
        (root / "weights" if weights is None else _expanded(weights)).absolute(),
        (root / "checkpoints" if saves is None else _expanded(saves)).absolute(),
    )
    if config.run_dir is None:
        _place_ledger(config, paths)
        return paths
    _check_resume(config, paths)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"can't be made: {error.strerror or type(error).__name__}"
        raise ConfigError(Fault("--run-dir", config.run_dir, reason, "give another folder")) from None
    _place_ledger(config, paths)
    return replace(paths, resumed=paths.record.exists())


def holds_run(config: RunConfig) -> bool:
    """Whether --run-dir names a directory in which a run was begun."""
    return config.run_dir is not None and (_expanded(config.run_dir) / RECORD).exists()


def _check_resume(config: RunConfig, paths: RunPaths) -> None:
    """Once more than turnout.config.check_files does: the directory may have got a run meanwhile."""
    if paths.record.exists():
        if config.resume == "never":
            remedy = "give another folder, or --resume auto"
            raise ConfigError(Fault("--run-dir", str(config.run_dir), "holds a run already", remedy))
    elif paths.events.exists():
        reason = "holds a run that cannot be gone on with: it has no run.json"
        raise ConfigError(Fault("--run-dir", str(config.run_dir), reason, "give another folder"))


def _place_ledger(config: RunConfig, paths: RunPaths) -> None:
    """Links the run's directory to --ledger-dir, once; raises ConfigError where that holds another ledger."""
    link = paths.root / LEDGER
    if config.ledger_dir is None or link.is_symlink() or link.exists():
        return
    folder = _expanded(config.ledger_dir).absolute()
    if (folder / LEDGER).exists():
        remedy = "give each run a folder of its own"
        raise ConfigError(Fault("--ledger-dir", config.ledger_dir, f"holds a {LEDGER} already", remedy))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder / LEDGER)
    except OSError as error:
        reason = f"can't be used: {error.strerror or type(error).__name__}"
        raise ConfigError(Fault("--ledger-dir", config.ledger_dir, reason, "give another folder")) from None


def _expanded(text: str) -> Path:
    return Path(os.path.expanduser(text))  # noqa: PTH111  pathlib's raises for an unknown user


def _numbered(name: str, base: Path) -> Path:
    try:
        base.mkdir(parents=True, exist_ok=True)
        for number in range(1, MAX_RUNS):
            folder = base / f"{name}-{number:03d}"
            with contextlib.suppress(FileExistsError):
                folder.mkdir()  # of two runs that start at once, one gets the number
                return folder
    except OSError as error:
        reason = f"{base.absolute()} can't be made or written: {error.strerror or type(error).__name__}"
        raise ConfigError(Fault("--run-dir", "", reason, "give a folder of yours as --run-dir")) from None
    raise ConfigError(Fault("--run-name", name, f"{base} has {MAX_RUNS - 1} runs of it", "give another name"))
