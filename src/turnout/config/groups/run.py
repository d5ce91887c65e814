"""Options of the run as a whole: where it writes, what it shows."""

from __future__ import annotations

from typing import ClassVar, Literal

from turnout.config.option import PATH, Options, option


class RunOptions(Options):
    title: ClassVar[str] = "Run"

    run_dir: str | None = option(
        None,
        "Folder for everything the run writes. It must not hold a run yet.",
        unset="`runs/NAME-NNN`, the first free number",
        pattern=PATH,
    )
    run_name: str | None = option(
        None,
        "Name of the run.",
        unset="name of the YAML file, else `run`",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=64,
    )
    seed: int = option(1234, "Decides shuffling and sampling.", ge=0, lt=2**32)
    deterministic: bool = option(
        False,
        "Only the seed decides: the same run gives the same tokens, weights and metrics bit for bit. Requires "
        "--engine-threads 1 and --trainer-threads 1.",
    )
    save: str | None = option(
        None, "Folder for checkpoints of the trainer.", unset="no checkpoint", pattern=PATH
    )
    save_interval: int | None = option(
        None,
        "Checkpoint after every so many train steps.",
        unit="steps",
        unset="after the last step only",
        ge=1,
    )
    save_hf: str | None = option(
        None, "Folder for the last weights as a Hugging Face checkpoint.", unset="not written", pattern=PATH
    )


class SeeingOptions(Options):
    title: ClassVar[str] = "Seeing"

    log_level: Literal["debug", "info", "warning", "error"] = option("info", "Least level of log lines.")
    panel: Literal["auto", "on", "off"] = option(
        "auto", "Live panel: on a terminal only, always, or a plain line per step."
    )
    tensorboard: bool = option(True, "Write TensorBoard files to `tensorboard` in the run directory.")
    plots: bool = option(True, "Write PNG plots at the end of the run.")
    before_after_samples: int = option(
        3, "Held-out prompts whose completions before and after training are shown at the end.", ge=0
    )
