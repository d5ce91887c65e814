"""Whose directory a run directory is: run.json and config.json, and whether a command may go on with that run.

    run.json      {format, run_id, data, held_out, models}; created once, before anything else is written
    config.json   the configuration of the newest incarnation

Promises: the run id is the same over all incarnations; a finished run, one of another configuration and one whose
data has changed are refused with one message that names every difference; nothing is written before that.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from turnout.config.load import dump
from turnout.config.resume import differences, grows
from turnout.config.run_config import RunConfig
from turnout.config.rundir import RunPaths
from turnout.core.errors import ConfigError, Fault
from turnout.core.ports import Store
from turnout.core.rng import IdSource, random_id
from turnout.rollout.prompts import Fingerprint

FORMAT = 1
FINISHED = "finished"


@dataclass(frozen=True)
class RunRecord:
    """`held_out` is None where the run is not evaluated; `models` are RunConfig.frozen_models."""

    run_id: str
    data: Fingerprint
    held_out: Fingerprint | None
    models: dict[str, str] = field(default_factory=dict[str, str])


def open_record(
    paths: RunPaths, config: RunConfig, fingerprints: tuple[Fingerprint, Fingerprint | None], files: Store,
    ids: IdSource = random_id,
) -> RunRecord:  # fmt: skip
    """Begins the run, or goes on with the one that is there. Raises ConfigError as the module says."""
    if paths.resumed:
        record = _read(paths, files)
        _check(paths, config, record, RunRecord(record.run_id, *fingerprints, config.frozen_models), files)
        if paths.summary.exists():
            files.remove_tree(paths.summary)  # of the incarnation before; the end of this one writes it anew
    else:
        record = RunRecord(ids(), *fingerprints, config.frozen_models)
        text = json.dumps({"format": FORMAT, **asdict(record)}, indent=1).encode()
        if not files.create_once(paths.record, text):
            reason = "another run has just begun in it"
            raise ConfigError(Fault("--run-dir", str(paths.root), reason, "give another folder"))
    files.publish_file(paths.config, dump(config).encode())
    return record


def _read(paths: RunPaths, files: Store) -> RunRecord:
    try:
        row: dict[str, Any] = json.loads(files.read(paths.record))
        if row["format"] != FORMAT:
            raise ValueError(f"format {row['format']}")
        held_out = row["held_out"]
        return RunRecord(
            str(row["run_id"]),
            Fingerprint(**row["data"]),
            None if held_out is None else Fingerprint(**held_out),
            row.get("models", {}),
        )
    except (ValueError, KeyError, TypeError) as fault:
        reason = f"is not the record of a run: {fault!r}"
        raise ConfigError(Fault(str(paths.record), "", reason, "give another --run-dir")) from None


def _check(paths: RunPaths, config: RunConfig, then: RunRecord, now: RunRecord, files: Store) -> None:
    faults: list[Fault] = []
    extended = False
    if paths.config.exists():  # else the run was killed before it did anything
        old: dict[str, Any] = json.loads(files.read(paths.config))
        faults, extended = differences(old, config), grows(old, config)
    for flag, before, after in (
        ("--prompt-data", then.data, now.data),
        ("--eval-prompt-data", then.held_out, now.held_out),
    ):
        if before is not None and after is not None and not faults:
            remedy = "restore the data, or give another --run-dir"
            faults += [Fault(flag, "", text, remedy) for text in before.differences(after)]
    for name, path in then.models.items():
        if (given := now.models.get(name)) != path:
            reason = f"the model {name} of the run in --run-dir is {path}"
            faults.append(Fault("--sglang-config", given or "without it", reason, "give the same"))
    if not faults and not extended and _status(paths, files) == FINISHED:
        remedy = "give another folder, or a larger --num-rollout to go on"
        faults.append(Fault("--run-dir", str(paths.root), "holds a finished run", remedy))
    if faults:
        raise ConfigError(faults)


def _status(paths: RunPaths, files: Store) -> str:
    """How the newest incarnation ended; empty where it was killed."""
    if not paths.summary.exists():
        return ""
    return str(json.loads(files.read(paths.summary)).get("status", ""))
