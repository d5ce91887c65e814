"""Options of the prompt files and of evaluation."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from turnout.config.option import PATH, Options, option


class DataOptions(Options):
    title: ClassVar[str] = "Data"

    prompt_data: str = option(
        ...,
        "Prompts to train on: a .jsonl or .parquet file, a folder of datasets' save_to_disk, `hub:NAME` for a data "
        "set that datasets finds (docs/guides/data-and-rewards.md), `reasoning_gym:TASK` for a generated task, or "
        "`verifiers:TASKSET` for an environment of verifiers (docs/guides/agents.md); "
        "`@[a:b]` at the end takes a slice of the rows.",
        pattern=PATH,
    )
    input_key: str = option("input", "Key of a row that holds the prompt: text, or a list of chat messages.")
    label_key: str | None = option(
        None, "Key of a row that holds the label given to the reward.", unset="no label"
    )
    metadata_key: str = option("metadata", "Key of a row that holds a mapping given to the reward.")
    tool_key: str = option("tools", "Key of a row that holds the tools given to the chat template.")
    apply_chat_template: bool = option(
        False, "Render the prompt with the tokenizer's chat template. Prompts are sent as they are otherwise."
    )
    apply_chat_template_kwargs: dict[str, Any] = option(
        {}, 'More arguments for the chat template, such as {"enable_thinking": false}.'
    )
    rollout_shuffle: bool = option(True, "Shuffle the prompts, anew in every epoch, by --seed.")
    num_rollout: int | None = option(
        None,
        "Train steps of the run, each one rollout. With --num-epoch as well, whichever comes first ends it.",
        unit="steps",
        unset="until --num-epoch",
        ge=1,
    )
    num_epoch: int | None = option(
        None,
        "Passes over the prompts.",
        unit="epochs",
        unset="until --num-rollout",
        ge=1,
    )
    last_batch: Literal["train", "drop"] = option(
        "train",
        "What becomes of the prompts at the end of the data that don't fill a batch: train them as a smaller "
        "batch, or drop them, counted.",
    )
    rollout_max_prompt_len: int | None = option(
        None,
        "Longest prompt, counted after the chat template. Longer rows are left out and counted.",
        unit="tokens",
        unset="--rollout-max-context-len - 1, or no limit",
        ge=1,
    )


class EvalOptions(Options):
    title: ClassVar[str] = "Evaluation"

    eval_prompt_data: str | None = option(
        None, "Held-out prompts, in the forms of --prompt-data.", unset="no evaluation", pattern=PATH
    )
    eval_config: str | None = option(
        None,
        "A YAML file with several held-out data sets, each with its own sampling, in place of --eval-prompt-data.",
        unset="one data set",
        pattern=PATH,
    )
    eval_mode: Literal["shared", "checkpoint", "dedicated"] = option(
        "shared",
        "Who answers: the run's engines, while the version is theirs; an engine after the run, which keeps the "
        "version; or engines that only evaluate (--eval-model), while training goes on.",
    )
    eval_model: str | None = option(
        None,
        "Model of --sglang-config whose engines follow the versions to evaluate, for --eval-mode dedicated; it has "
        "update_weights: false and the path of the model that is trained.",
        unset="no such engines",
    )
    eval_hold: float = option(
        60.0,
        "Longest that an evaluation beside training (--schedule async) holds the next weights back, and with "
        "--eval-mode dedicated the end of the run; what is not done then is cut, and the point is not written.",
        unit="seconds",
        ge=0,
    )
    eval_interval: int | None = option(
        None,
        "Evaluate after every so many train steps.",
        unit="steps",
        unset="before the first and after the last step only",
        ge=1,
    )
    n_samples_per_eval_prompt: int = option(1, "Samples of each held-out prompt.", ge=1)
    eval_temperature: float = option(0.0, "Sampling temperature in evaluation; 0 is greedy.", ge=0)
    eval_sampled: bool = option(
        False, "Score held-out prompts a second time as rollouts are sampled, at --rollout-temperature."
    )
    eval_baseline_data: str | None = option(
        None,
        "Held-out prompts in another wording, such as with a worked example, scored once before training: what "
        "the untrained model reaches by prompting alone.",
        unset="no baseline",
        pattern=PATH,
    )
    eval_max_response_len: int | None = option(
        None,
        "Longest response in evaluation.",
        unit="tokens",
        unset="--rollout-max-response-len",
        ge=1,
    )
    eval_input_key: str | None = option(None, "As --input-key, for held-out prompts.", unset="--input-key")
    eval_label_key: str | None = option(None, "As --label-key, for held-out prompts.", unset="--label-key")
    eval_num_prompts: int | None = option(
        None, "Use only the first so many held-out prompts.", unit="prompts", unset="all", ge=1
    )
    skip_eval_before_train: bool = option(False, "Leave out the evaluation before the first step.")
