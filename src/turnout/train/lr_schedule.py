"""The learning rate as a pure function of the optimizer steps applied: a resume needs only that number."""

from __future__ import annotations

import math

from turnout.train.settings import OptimizerSettings


def learning_rate(settings: OptimizerSettings, applied: int) -> float:
    """The rate of the next step, after `applied` steps: a linear warmup from lr / warmup_steps to lr, then the
    schedule down to lr * min_lr_ratio at `total_steps`, and that value from there on."""
    if applied < settings.warmup_steps:
        return settings.lr * (applied + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    done = min(1.0, (applied - settings.warmup_steps) / (settings.total_steps - settings.warmup_steps))
    left = 1.0 - done if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.lr * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * left)
