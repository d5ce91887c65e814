"""Checks of paths: what is read must exist, and no two outputs, nor an output and an input, may be the same.

Only existence is asked here; content is checked by whoever reads it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from turnout.config.near import near_path
from turnout.config.run_config import RunConfig
from turnout.core.errors import Fault

_GENERATED, _HUB = ("reasoning_gym:", "verifiers:"), "hub:"
_FORMS = (".jsonl", ".json", ".ndjson", ".parquet")
_SLICE = re.compile(r"@\[[^\]]*\]$")
_INPUTS = (
    "--hf-checkpoint",
    "--ref-load",
    "--critic-load",
    "--prompt-data",
    "--eval-prompt-data",
    "--eval-baseline-data",
    "--eval-config",
    "--load-debug-rollout-data",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


def is_generated(data: str) -> bool:
    """Whether prompt data is made by a program instead of read from a file."""
    return data.startswith(_GENERATED)


def prompt_files(c: RunConfig) -> Iterator[Fault]:
    yield from _prompt_file("--prompt-data", c.prompt_data)


def eval_prompt_files(c: RunConfig) -> Iterator[Fault]:
    if c.eval_prompt_data is not None:
        yield from _prompt_file("--eval-prompt-data", c.eval_prompt_data)


def eval_config_file(c: RunConfig) -> Iterator[Fault]:
    if c.eval_config is not None and not is_file(c.eval_config):
        remedy = near_path(c.eval_config, "give a .yaml or .json file")
        yield Fault("--eval-config", c.eval_config, "no such file", remedy)


def model_folder(c: RunConfig) -> Iterator[Fault]:
    yield from _model("--hf-checkpoint", c.hf_checkpoint)


def reference_folder(c: RunConfig) -> Iterator[Fault]:
    if c.ref_load is not None:
        yield from _model("--ref-load", c.ref_load)


def critic_folder(c: RunConfig) -> Iterator[Fault]:
    if c.critic_load is not None:
        yield from _model("--critic-load", c.critic_load)


def outputs_differ(c: RunConfig) -> Iterator[Fault]:
    """The same place after normalisation, whatever the spelling; each pair is told once."""
    seen: dict[str, str] = {}
    for flag, path in (
        ("--hf-checkpoint", c.hf_checkpoint),
        ("--ref-load", c.ref_load),
        ("--critic-load", c.critic_load),
        ("--prompt-data", _whole(c.prompt_data)),
        ("--eval-prompt-data", _whole(c.eval_prompt_data)),
        ("--eval-baseline-data", _whole(c.eval_baseline_data)),
        ("--eval-config", c.eval_config),
        ("--load-debug-rollout-data", c.load_debug_rollout_data),
        ("--run-dir", c.run_dir),
        ("--ledger-dir", c.ledger_dir),
        ("--save", c.save),
        ("--save-hf", c.save_hf),
        ("--update-weight-disk-dir", c.weight_folder),
        ("--save-debug-rollout-data", c.save_debug_rollout_data),
    ):
        if path is None:
            continue
        places = _places(path)
        told = next((seen[place] for place in places if place in seen), None)
        if flag not in _INPUTS and told is not None:
            yield Fault(flag, path, f"the same place as {told}", "give each output a place of its own")
        for place in places:
            seen.setdefault(place, flag)


def _whole(data: str | None) -> str | None:
    """The file of a data option, which may name a part of it."""
    return None if data is None else _SLICE.sub("", data)


def _places(path: str) -> tuple[str, ...]:
    """The path, and that of the first step, which may also be written without {rollout_id}."""
    spellings = (path, path.replace("{rollout_id}", "0"))
    return tuple(os.path.realpath(os.path.expanduser(one)) for one in spellings)  # noqa: PTH111


def outputs_are_folders(c: RunConfig) -> Iterator[Fault]:
    for flag, path in (
        ("--run-dir", c.run_dir),
        ("--ledger-dir", c.ledger_dir),
        ("--save", c.save),
        ("--save-hf", c.save_hf),
        ("--update-weight-disk-dir", c.weight_folder),
    ):
        if path is not None and exists(path) and not is_folder(path):
            yield Fault(flag, path, "exists and is no folder", "give another path")


def async_save_has_a_next_step(c: RunConfig) -> Iterator[Fault]:
    if not c.async_save:
        return
    if c.save_interval is None:
        reason = "nothing is saved beside training: the last checkpoint is waited for"
        yield Fault("--async-save", "", reason, "give --save-interval")


def run_dir_and_resume(c: RunConfig) -> Iterator[Fault]:
    holds_run = c.run_dir is not None and exists(f"{c.run_dir}/run.json")
    if c.run_dir is not None and holds_run and c.resume == "never":
        yield Fault("--run-dir", c.run_dir, "holds a run already", "give another folder, or --resume auto")
    elif c.run_dir is not None and not holds_run and exists(f"{c.run_dir}/events.jsonl"):
        reason = "holds a run that cannot be gone on with: it has no run.json"
        yield Fault("--run-dir", c.run_dir, reason, "give another folder")
    elif c.resume == "must" and not holds_run:
        reason = "there is no run to go on with" + ("" if c.run_dir is None else f" in {c.run_dir}")
        yield Fault("--resume", "must", reason, "give the --run-dir of an interrupted run, or --resume auto")


def exists(text: str) -> bool:
    """Whether there is such a file or folder. Unlike pathlib's, these three answer False for any odd path."""
    return os.path.exists(os.path.expanduser(text))  # noqa: PTH110, PTH111


def is_file(text: str) -> bool:
    return os.path.isfile(os.path.expanduser(text))  # noqa: PTH111, PTH113


def is_folder(text: str) -> bool:
    return os.path.isdir(os.path.expanduser(text))  # noqa: PTH111, PTH112


def _prompt_file(flag: str, data: str) -> Iterator[Fault]:
    if is_generated(data) or data.startswith(_HUB):
        return
    path = _SLICE.sub("", data)
    if is_folder(path):
        if not is_file(f"{path}/state.json") and not is_file(f"{path}/dataset_dict.json"):
            remedy = "give a .jsonl or .parquet file in it, or hub:FOLDER for what datasets reads"
            yield Fault(flag, data, "is a folder, and no data set of save_to_disk", remedy)
    elif not exists(path):
        remedy = near_path(path, "give a .jsonl or .parquet file, or `reasoning_gym:TASK`")
        yield Fault(flag, data, "no such file", remedy)
    elif not path.endswith(_FORMS):
        reason = f"files of this kind are not read, only {', '.join(_FORMS)}"
        yield Fault(flag, data, reason, "give a .jsonl or .parquet file")


def _model(flag: str, model: str) -> Iterator[Fault]:
    if is_folder(model):
        if not is_file(f"{model}/config.json"):
            yield Fault(flag, model, "the folder has no config.json", "give a Hugging Face checkpoint")
    elif exists(model):
        yield Fault(flag, model, "is a file", "give the folder of a Hugging Face checkpoint")
    elif model.startswith("tiny:"):
        return  # made on the fly; the maker knows its kinds
    elif _HUB_ID.fullmatch(model) is None:
        remedy = near_path(model, "give a folder, a hub id, or fetch one: `turnout model fetch`")
        yield Fault(flag, model, "no such folder", remedy)


FILE_CHECKS = (
    prompt_files,
    eval_prompt_files,
    eval_config_file,
    model_folder,
    reference_folder,
    critic_folder,
    outputs_differ,
    outputs_are_folders,
    async_save_has_a_next_step,
    run_dir_and_resume,
)
