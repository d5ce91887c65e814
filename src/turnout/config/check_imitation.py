"""What must hold of the options of distillation. Rules as in turnout.config.checks."""

from __future__ import annotations

from collections.abc import Iterator

from turnout.config.run_config import RunConfig
from turnout.core.errors import Fault


def teacher_is_there(c: RunConfig) -> Iterator[Fault]:
    if c.use_opd and c.opd_teacher is None:
        yield Fault("--use-opd", "", "nobody teaches", "give --opd-teacher with a frozen model")
    if c.opd_teacher is not None and not c.use_opd:
        yield Fault("--opd-teacher", c.opd_teacher, "nothing asks the teacher", "give --use-opd")


def teacher_scores_as_sampled(c: RunConfig) -> Iterator[Fault]:
    if c.use_opd and c.rollout_temperature != 1:
        reason = (
            "engines score a prompt at temperature 1, and the teacher's log-probs are compared with these"
        )
        yield Fault("--rollout-temperature", f"{c.rollout_temperature:g}", reason, "give 1 with --use-opd")


def nothing_to_filter_by(c: RunConfig) -> Iterator[Fault]:
    if c.reward == "none" and c.dynamic_sampling:
        reason = "without rewards all members of a group are equal, and every group would be left out"
        yield Fault("--dynamic-sampling", "true", reason, "leave it out, or give a reward")


IMITATION_CHECKS = (teacher_is_there, teacher_scores_as_sampled, nothing_to_filter_by)
