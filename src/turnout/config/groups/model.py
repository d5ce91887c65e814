"""Options of the model that is trained, and of its frozen reference."""

from __future__ import annotations

from typing import ClassVar, Literal

from turnout.config.option import PATH, Options, option


class ModelOptions(Options):
    title: ClassVar[str] = "Model"

    hf_checkpoint: str = option(
        ...,
        "Model to start from: a directory with a Hugging Face checkpoint, or a hub id. Trainer and engines both "
        "load it, and the tokenizer and chat template come from it.",
        pattern=PATH,
    )
    dtype: Literal["bfloat16", "float32"] = option(
        "bfloat16",
        "Type in which trainer and engines compute, and of the published weights. Master weights and optimizer "
        "state are float32 in both cases.",
    )
    ref_load: str | None = option(
        None,
        "Frozen reference model for the KL term: a directory with a Hugging Face checkpoint.",
        unset="--hf-checkpoint",
        pattern=PATH,
    )
    ref_model: str | None = option(
        None,
        "Frozen model of --sglang-config whose engines give the log-probs of the reference, in place of a copy "
        "in the trainer.",
        unset="the trainer holds the reference",
    )
