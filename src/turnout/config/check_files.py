"""Checks of paths: what is read must exist, and no two outputs, nor an output and an input, may be the same.

Only existence is asked here; content is checked by whoever reads it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from turnout.config.run_config import RunConfig
from turnout.core.errors import Fault

_GENERATED = "reasoning_gym:"
_FORMS = (".jsonl", ".json", ".ndjson", ".parquet")
_SLICE = re.compile(r"@\[[^\]]*\]$")
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


def is_generated(data: str) -> bool:
    """Whether prompt data is made by a program (`reasoning_gym:TASK`) instead of read from a file."""
    return data.startswith(_GENERATED)


def prompt_files(c: RunConfig) -> Iterator[Fault]:
    yield from _prompt_file("--prompt-data", c.prompt_data)


def eval_prompt_files(c: RunConfig) -> Iterator[Fault]:
    if c.eval_prompt_data is not None:
        yield from _prompt_file("--eval-prompt-data", c.eval_prompt_data)


def model_folder(c: RunConfig) -> Iterator[Fault]:
    yield from _model("--hf-checkpoint", c.hf_checkpoint)


def reference_folder(c: RunConfig) -> Iterator[Fault]:
    if c.ref_load is not None:
        yield from _model("--ref-load", c.ref_load)


def outputs_differ(c: RunConfig) -> Iterator[Fault]:
    """The same place after normalisation, whatever the spelling; each pair is told once."""
    seen: dict[str, str] = {}
    for flag, path in (
        ("--hf-checkpoint", c.hf_checkpoint),
        ("--ref-load", c.ref_load),
        ("--prompt-data", c.prompt_data),
        ("--eval-prompt-data", c.eval_prompt_data),
        ("--run-dir", c.run_dir),
        ("--save", c.save),
        ("--save-hf", c.save_hf),
        ("--update-weight-disk-dir", c.update_weight_disk_dir),
    ):
        if path is None:
            continue
        place = os.path.realpath(path)
        is_output = flag not in ("--hf-checkpoint", "--ref-load", "--prompt-data", "--eval-prompt-data")
        if is_output and place in seen:
            yield Fault(flag, path, f"the same place as {seen[place]}", "give each output a place of its own")
        seen.setdefault(place, flag)


def outputs_are_folders(c: RunConfig) -> Iterator[Fault]:
    for flag, path in (
        ("--run-dir", c.run_dir),
        ("--save", c.save),
        ("--save-hf", c.save_hf),
        ("--update-weight-disk-dir", c.update_weight_disk_dir),
    ):
        if path is None:
            continue
        if not path.strip():
            yield Fault(flag, repr(path), "the path is empty", "give a folder")
        elif Path(path).exists() and not Path(path).is_dir():
            yield Fault(flag, path, "exists and is no folder", "give another path")


def run_dir_is_free(c: RunConfig) -> Iterator[Fault]:
    if c.run_dir is not None and Path(c.run_dir, "events.jsonl").exists():
        yield Fault("--run-dir", c.run_dir, "holds a run already", "give another folder, or leave it out")


def _prompt_file(flag: str, data: str) -> Iterator[Fault]:
    if is_generated(data):
        return
    path = Path(_SLICE.sub("", data)).expanduser()
    if not path.exists():
        yield Fault(flag, data, "no such file", "give a .jsonl or .parquet file, or `reasoning_gym:TASK`")
    elif path.is_dir():
        yield Fault(flag, data, "is a folder", "give a .jsonl or .parquet file in it")
    elif path.suffix not in _FORMS:
        yield Fault(
            flag, data, f"files that end in {path.suffix!r} are not read", "give a .jsonl or .parquet file"
        )


def _model(flag: str, model: str) -> Iterator[Fault]:
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            yield Fault(flag, model, "the folder has no config.json", "give a Hugging Face checkpoint")
    elif path.exists():
        yield Fault(flag, model, "is a file", "give the folder of a Hugging Face checkpoint")
    elif _HUB_ID.fullmatch(model) is None:
        yield Fault(
            flag, model, "no such folder", "give a folder, a hub id, or fetch one: `turnout model fetch`"
        )


FILE_CHECKS = (
    prompt_files,
    eval_prompt_files,
    model_folder,
    reference_folder,
    outputs_differ,
    outputs_are_folders,
    run_dir_is_free,
)
