"""Options for looking at one half of a run alone: rollouts without a trainer, training without engines."""

from __future__ import annotations

from typing import ClassVar

from turnout.config.option import PATH, Options, option


class DebugOptions(Options):
    title: ClassVar[str] = "Debugging"

    save_debug_rollout_data: str | None = option(
        None,
        "File that each step's batch is written to, as safetensors; {rollout_id} in it stands for the step.",
        unset="only a batch that broke its step is written, into the run directory",
        pattern=PATH,
    )
    load_debug_rollout_data: str | None = option(
        None,
        "Train on saved batches, without engines: files as of --save-debug-rollout-data, in the order of their "
        "steps from 0, or the folder of a batch that broke its step.",
        unset="batches are sampled",
        pattern=PATH,
    )
    debug_rollout_only: bool = option(
        False,
        "Sample and reward only: engines keep the weights of --hf-checkpoint, no trainer is loaded, every group is "
        "dropped after its step.",
    )
    debug_train_only: bool = option(
        False, "Start no engine: batches come from --load-debug-rollout-data, which implies this."
    )
