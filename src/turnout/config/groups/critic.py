"""Options of PPO's critic (--advantage-estimator ppo)."""

from __future__ import annotations

from typing import ClassVar

from turnout.config.option import PATH, Options, option


class CriticOptions(Options):
    title: ClassVar[str] = "Critic"

    critic_load: str | None = option(
        None,
        "Model whose layers the critic of --advantage-estimator ppo begins with: a directory with a Hugging Face "
        "checkpoint. Its head begins at 0.",
        unset="--hf-checkpoint",
        pattern=PATH,
    )
    critic_lr: float | None = option(None, "Peak learning rate of the critic.", unset="--lr", gt=0)
    critic_lr_warmup_iters: int = option(
        0, "Optimizer steps of the critic in which its learning rate rises from 0.", ge=0
    )
    num_critic_only_steps: int = option(
        0, "Train steps at the beginning that train the critic alone.", unit="steps", ge=0
    )
    value_clip: float = option(
        0.2, "Furthest that a value may be pulled from what it was before the train step.", gt=0
    )
    lambd: float = option(
        1.0,
        "Lambda of GAE: at 1 an advantage is the discounted reward less the value, at 0 the critic's error of one "
        "token.",
        ge=0,
        le=1,
    )
