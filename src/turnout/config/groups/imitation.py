"""Options of learning from answers of the data, and from a teacher (docs/guides/sft-and-distillation.md)."""

from __future__ import annotations

from typing import ClassVar, Literal

from turnout.config.option import Options, option


class ImitationOptions(Options):
    title: ClassVar[str] = "Imitation"

    loss_type: Literal["policy_loss", "sft_loss"] = option(
        "policy_loss",
        "What is trained on: the policy's own samples, or (sft_loss) answers that --prompt-data gives, the row's "
        "messages of the assistant or its label, by their cross entropy. Without evaluation no engine is started.",
    )
    use_opd: bool = option(
        False,
        "On-policy distillation: the policy is pulled towards --opd-teacher on its own samples. With a reward, "
        "beside it; without one, alone.",
    )
    opd_teacher: str | None = option(
        None,
        "Frozen model of --sglang-config whose engines give the teacher's log-probs; it has the tokenizer of "
        "--hf-checkpoint.",
        unset="no teacher",
    )
    opd_kl_coef: float = option(1.0, "Weight of the reverse KL to the teacher in the advantages.", ge=0)
