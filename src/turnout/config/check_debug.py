"""Checks of the debug options: one half of a run at a time, and every saved batch in a file of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator

from turnout.config.check_files import exists, is_file, is_folder
from turnout.config.run_config import RunConfig, specs
from turnout.core.errors import Fault

STEP = "{rollout_id}"  # slime's name
_SAVE, _LOAD = "--save-debug-rollout-data", "--load-debug-rollout-data"


def one_half(c: RunConfig) -> Iterator[Fault]:
    if c.debug_rollout_only and c.train_only:
        flag = "--debug-train-only" if c.debug_train_only else _LOAD
        yield Fault("--debug-rollout-only", "", f"{flag} leaves the other half out", "give one of the two")
    elif c.debug_train_only and c.load_debug_rollout_data is None:
        yield Fault("--debug-train-only", "", "there is nothing to train on", f"give {_LOAD}")


def one_file_for_each_step(c: RunConfig) -> Iterator[Fault]:
    for flag, path in ((_SAVE, c.save_debug_rollout_data), (_LOAD, c.load_debug_rollout_data)):
        for name in re.findall(r"\{[^}]*\}", path or ""):
            if name != STEP:
                yield Fault(flag, str(path), f"{name} stands for nothing", f"write {STEP} for the step")
    saved = c.save_debug_rollout_data
    if saved is not None and STEP not in saved and c.num_rollout != 1:
        reason = "each step would replace the file of the one before"
        yield Fault(_SAVE, saved, reason, f"put {STEP} into it, or give --num-rollout 1")


def saved_batch_is_there(c: RunConfig) -> Iterator[Fault]:
    path = c.load_debug_rollout_data
    if path is None:
        return
    first = path.replace(STEP, "0")
    if not exists(first):
        yield Fault(_LOAD, path, f"there is no {first}", f"give what {_SAVE} was given")
    elif is_folder(first) and not is_file(f"{first}/batch.safetensors"):
        yield Fault(_LOAD, path, f"{first} holds no batch.safetensors", "give the folder of a broken step")


def saved_batches_make_no_checkpoint(c: RunConfig) -> Iterator[Fault]:
    """Options of a run that is gone on with, and of engines beside the trainer."""
    if not c.train_only:
        return
    for name in ("save", "save_interval"):  # without which --async-save is refused
        if (value := getattr(c, name)) != specs()[name].default:
            reason = f"a run on saved batches ({_LOAD}) begins anew and has no checkpoints"
            yield Fault(specs()[name].flag, str(value), reason, "give --save-hf for its last weights")
    for name in ("offload", "offload_train", "offload_rollout"):
        if getattr(c, name):
            yield Fault(
                specs()[name].flag, "", f"{_LOAD} starts no engine to take turns with", "leave it out"
            )


DEBUG_CHECKS = (one_half, one_file_for_each_step, saved_batch_is_there, saved_batches_make_no_checkpoint)
