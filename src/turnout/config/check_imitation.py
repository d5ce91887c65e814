"""What must hold of the options of fine-tuning and distillation. Rules as in turnout.config.checks."""

from __future__ import annotations

from collections.abc import Iterator

from turnout.config.run_config import RunConfig, specs
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
    if c.reward != "none":
        return
    if c.dynamic_sampling:
        reason = "without rewards all members of a group are equal, and every group would be left out"
        yield Fault("--dynamic-sampling", "true", reason, "leave it out, or give a reward")
    if c.eval_prompt_data is not None:
        yield Fault("--eval-prompt-data", c.eval_prompt_data, "nothing scores the answers", "give a reward")


def fine_tuning_samples_nothing(c: RunConfig) -> Iterator[Fault]:
    """Options of rollouts that a run on the data's own answers would not look at."""
    if not c.fine_tunes:
        return
    for name, neutral in (
        ("advantage_estimator", "grpo"), ("use_opd", False), ("use_kl_loss", False), ("kl_coef", 0.0),
        ("schedule", "sync"), ("n_samples_per_prompt", 1), ("custom_generate_function_path", None),
        ("custom_agent_path", None),
        ("dynamic_sampling", False), ("over_sampling_batch_size", None), ("off_policy", "none"),
        ("rollout_temperature", 1.0), ("use_rollout_logprobs", False), ("group_rm", False),
        ("entropy_coef", 0.0), ("use_opsm", False), ("overlong_buffer_len", None), ("eps_clip_c", None),
        ("mask_truncated_completions", False), ("custom_advantage_function_path", None),
        ("custom_loss_function_path", None), ("debug_rollout_only", False),
    ):  # fmt: skip
        value = getattr(c, name)
        if value != neutral:
            reason = (
                "--loss-type sft_loss trains on the answers of --prompt-data, each once, and samples none"
            )
            remedy = "give 1" if name == "n_samples_per_prompt" else "leave it out"
            yield Fault(specs()[name].flag, str(value), reason, remedy)
    if c.prompt_data.startswith(("reasoning_gym:", "verifiers:")):
        yield Fault("--prompt-data", c.prompt_data, "is a task, which shows no answers", "give a file")


def nobody_is_asked(c: RunConfig) -> Iterator[Fault]:
    """Options about engines, of a run that has none."""
    if c.asks_engines:
        return
    for name in (
        "router", "router_policy", "router_args", "sglang_router_ip", "rollout_external_engine_addrs",
        "rollout_external_engine_file", "update_weight_mode",
    ):  # fmt: skip
        value = getattr(c, name)
        if value not in (specs()[name].default, "direct"):
            reason = "--loss-type sft_loss without an evaluation has no engines"
            yield Fault(specs()[name].flag, str(value), reason, "leave it out, or give --eval-prompt-data")


IMITATION_CHECKS = (
    teacher_is_there,
    teacher_scores_as_sampled,
    nothing_to_filter_by,
    fine_tuning_samples_nothing,
    nobody_is_asked,
)
