"""Options of the run as a whole: where it writes, what it shows."""

from __future__ import annotations

from typing import ClassVar, Literal

from turnout.config.option import PATH, Options, option


class RunOptions(Options):
    title: ClassVar[str] = "Run"

    run_dir: str | None = option(
        None,
        "Folder for everything the run writes. An interrupted run in it goes on (--resume).",
        unset="`runs/NAME-NNN`, the first free number",
        pattern=PATH,
    )
    resume: Literal["auto", "never", "must"] = option(
        "auto",
        "What to do where --run-dir holds an interrupted run of this configuration: auto and must go on with it, "
        "never refuses; must also refuses where there is none. A finished run, or one of another configuration, "
        "is always refused (docs/guides/resume.md).",
    )
    on_resume: Literal["replay", "mask", "drop"] = option(
        "replay",
        "Stored tokens of weights that a resumed run made anew, but not to the same bits: the prompt is sampled "
        "again, the tokens carry no loss, or the group is dropped. Where the bits are the same they train.",
    )
    ledger_dir: str | None = option(
        None,
        "Folder of the run's ledger, on a local disk, where that of the run is none; one for each run.",
        unset="the run directory",
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
        None,
        "Folder for checkpoints, from which an interrupted run goes on.",
        unset="`checkpoints` in the run directory, with --save-interval",
        pattern=PATH,
    )
    save_interval: int | None = option(
        None,
        "Checkpoint after every so many train steps.",
        unit="steps",
        unset="after the last step only",
        ge=1,
    )
    async_save: bool = option(
        False,
        "Write the checkpoints of --save-interval beside training, from a copy of the trainer's state in memory "
        "(12 bytes a parameter); the failure of one ends the run at the next.",
    )
    max_wall_time: float | None = option(
        None,
        "Stop in good order after so long, as on SIGTERM, with the status `paused` and exit status 0.",
        unit="seconds",
        unset="no limit",
        gt=0,
    )
    run_dir_max_gb: float | None = option(
        None,
        "Stop in the same way once --run-dir is found to hold more.",
        unit="GB",
        unset="no limit",
        gt=0,
    )
    grace_s: float = option(
        30.0,
        "On SIGTERM, SIGUSR1 or --max-wall-time: time for the step under way and a checkpoint, before the run is "
        "cut off where it is.",
        unit="seconds",
        gt=0,
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
    stall_warning_s: float = option(
        25.0,
        "Tell who waits for whom once what the run waits for has not moved for so long (`turnout doctor` tells it "
        "at any time).",
        unit="seconds",
        gt=0,
    )
    tensorboard: bool = option(True, "Write TensorBoard files to `tensorboard` in the run directory.")
    use_wandb: bool = option(
        False,
        "Report to Weights & Biases (package wandb). Without --wandb-mode: online, and offline where that can't be "
        "had. The key is that of `wandb login` or WANDB_API_KEY.",
    )
    wandb_project: str | None = option(None, "W&B project.", unset="W&B's own")
    wandb_team: str | None = option(None, "W&B team (entity).", unset="W&B's own")
    wandb_group: str | None = option(None, "W&B group of runs.", unset="none")
    wandb_mode: Literal["online", "offline", "disabled"] | None = option(
        None, "How W&B works.", unset="online if that can be had"
    )
    wandb_dir: str | None = option(
        None, "Folder of W&B's files.", unset="`wandb` in the run directory", pattern=PATH
    )
    metrics_port: int | None = option(
        None,
        "Serve Prometheus metrics of the run at http://127.0.0.1:PORT/metrics; 0: a free port, told at the start.",
        unset="not served",
        ge=0,
        le=65535,
    )
    plots: bool = option(True, "Write PNG plots at the end of the run.")
    before_after_samples: int = option(
        3, "Held-out prompts whose completions before and after training are shown at the end.", ge=0
    )
