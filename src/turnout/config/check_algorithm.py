"""What must hold between the options of the algorithm. Rules as in turnout.config.checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from turnout.config.estimators import ESTIMATORS
from turnout.config.run_config import RunConfig
from turnout.core.errors import Fault

UNUSED = "nothing uses the reference"
REFERENCE_USERS = "give --use-kl-loss or --kl-coef"


def group_has_a_baseline(c: RunConfig) -> Iterator[Fault]:
    if c.reward == "none" or c.fine_tunes or c.custom_advantage_function_path is not None:
        return
    if ESTIMATORS[c.advantage_estimator].baseline != "none" and c.n_samples_per_prompt == 1:
        name = c.advantage_estimator
        reason = f"{name} compares the samples of one prompt; of a single sample every advantage is 0"
        remedy = "give at least 2, usually 4 to 16, or use --advantage-estimator reinforce_plus_plus"
        yield Fault("--n-samples-per-prompt", "1", reason, remedy)


def estimator_has_a_use(c: RunConfig) -> Iterator[Fault]:
    """Options that the chosen estimator doesn't look at."""
    estimator, name = ESTIMATORS[c.advantage_estimator], c.advantage_estimator
    if estimator.baseline != "mean" and c.grpo_std_normalization:
        reason = f"{name} has no standard deviation of a group"
        yield Fault("--grpo-std-normalization", "true", reason, "leave it out, or use --normalize-advantages")
    if estimator.baseline != "none" and c.gamma < 1:
        reason = f"{name} gives all tokens of a response the same advantage"
        remedy = "leave it out, or use --advantage-estimator reinforce_plus_plus"
        yield Fault("--gamma", f"{c.gamma:g}", reason, remedy)
    if estimator.loss == "cispo" and c.eps_clip_c is not None:
        reason = "cispo bounds the ratio by --eps-clip-high for every advantage"
        yield Fault("--eps-clip-c", f"{c.eps_clip_c:g}", reason, "leave it out")


def critic_makes_the_advantages(c: RunConfig) -> Iterator[Fault]:
    path = c.custom_advantage_function_path
    if path is not None and ESTIMATORS[c.advantage_estimator].critic:
        remedy = "leave it out, or choose another --advantage-estimator"
        yield Fault(
            "--custom-advantage-function-path", path, "the critic of ppo makes the advantages", remedy
        )


def dual_clip_is_above(c: RunConfig) -> Iterator[Fault]:
    if c.eps_clip_c is not None and c.eps_clip_c <= 1 + c.clip_range[1]:
        reason = f"the ratio is clipped at 1 + {c.clip_range[1]:g} already where the advantage is positive"
        yield Fault("--eps-clip-c", f"{c.eps_clip_c:g}", reason, "give a larger one, usually 3")


def opsm_is_used(c: RunConfig) -> Iterator[Fault]:
    if c.opsm_delta is not None and not c.use_opsm:
        yield Fault("--opsm-delta", f"{c.opsm_delta:g}", "nothing is left out", "give --use-opsm")


def overlong_fits(c: RunConfig) -> Iterator[Fault]:
    buffer, limit = c.overlong_buffer_len, c.rollout_max_response_len
    if buffer is None and c.overlong_penalty_factor is not None:
        where, value = "--overlong-penalty-factor", f"{c.overlong_penalty_factor:g}"
        yield Fault(where, value, "no length costs anything", "give --overlong-buffer-len")
    if buffer is not None and buffer >= limit:
        reason = f"responses have at most --rollout-max-response-len {limit} tokens"
        yield Fault("--overlong-buffer-len", str(buffer), reason, f"give at most {limit - 1}")


def reference_is_one(c: RunConfig) -> Iterator[Fault]:
    if c.ref_model is None:
        return
    if c.ref_load is not None:
        reason = f"--ref-load {c.ref_load} is a reference already"
        yield Fault("--ref-model", c.ref_model, reason, "leave one of the two out")
    if not c.uses_reference:
        yield Fault("--ref-model", c.ref_model, UNUSED, REFERENCE_USERS)
    if c.rollout_temperature != 1:
        reason = (
            f"engines score a prompt at temperature 1, --rollout-temperature is {c.rollout_temperature:g}"
        )
        yield Fault("--ref-model", c.ref_model, reason, "leave it out: the trainer scores at any temperature")


def kl_is_used(c: RunConfig) -> Iterator[Fault]:
    if c.kl_loss_coef > 0 and c.kl_coef > 0:
        reason = "the KL is in the loss already, by --kl-loss-coef"
        yield Fault("--kl-coef", f"{c.kl_coef:g}", reason, "leave one of the two out")
    if not c.use_kl_loss:
        if c.kl_loss_coef > 0:
            yield Fault("--kl-loss-coef", f"{c.kl_loss_coef:g}", "there is no KL term", "give --use-kl-loss")
        if c.use_unbiased_kl:
            yield Fault("--use-unbiased-kl", "true", "there is no KL in the loss", "give --use-kl-loss")
    if not c.uses_reference and c.ref_load is not None:
        yield Fault("--ref-load", c.ref_load, UNUSED, REFERENCE_USERS)


def balance_has_a_kind(c: RunConfig) -> Iterator[Fault]:
    if c.moe_aux_loss_coeff > 0 and c.moe_router_load_balancing_type == "none":
        remedy = "give --moe-router-load-balancing-type seq_aux_loss"
        yield Fault("--moe-aux-loss-coeff", f"{c.moe_aux_loss_coeff:g}", "no loss balances experts", remedy)


ALGORITHM_CHECKS: tuple[Callable[[RunConfig], Iterator[Fault]], ...] = (
    group_has_a_baseline,
    estimator_has_a_use,
    critic_makes_the_advantages,
    dual_clip_is_above,
    opsm_is_used,
    overlong_fits,
    reference_is_one,
    kl_is_used,
    balance_has_a_kind,
)
