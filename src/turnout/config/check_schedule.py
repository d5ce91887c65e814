"""What must hold between the options of the schedule: the lead, the bound on the lag, slots, window, deadlines,
and the off-policy correction."""

from __future__ import annotations

from collections.abc import Iterator

from turnout.config.run_config import RunConfig
from turnout.core.errors import Fault
from turnout.core.slots import lead_bound


def only_async_leads(c: RunConfig) -> Iterator[Fault]:
    if c.schedule == "async":
        return
    for flag, value in (
        ("--max-lead", c.max_lead),
        ("--rollout-slots", c.rollout_slots),
        ("--rollout-window", c.rollout_window),
    ):
        if value is not None:
            reason = f"the lead of the {c.schedule} schedule is fixed"
            yield Fault(flag, str(value), reason, "leave it out, or use --schedule async")


def deterministic_is_ordered(c: RunConfig) -> Iterator[Fault]:
    if c.deterministic and c.rollout_window not in (None, 1):
        reason = "--deterministic trains groups strictly in order"
        yield Fault("--rollout-window", str(c.rollout_window), reason, "leave it out")


def update_policy_fits(c: RunConfig) -> Iterator[Fault]:
    flag, policy = "--on-weight-update", c.on_weight_update
    if policy is not None and policy != "drain":
        if c.schedule != "async":
            reason = f"the {c.schedule} schedule changes weights when nothing is in flight"
            yield Fault(flag, policy, reason, "leave it out, or use --schedule async")
        elif c.deterministic:
            reason = "where a request meets new weights depends on more than the seed (--deterministic)"
            yield Fault(flag, policy, reason, "leave it out")
        elif policy == "continue" and c.engine == "sglang":
            reason = "SGLang does not say which tokens were made on KV of older weights"
            yield Fault(flag, policy, reason, "give retract or abort")
    if c.mask_kv_mixed and policy != "continue":
        reason = f"no token is made on KV of older weights with {flag} {c.weight_update_policy}"
        yield Fault("--mask-kv-mixed", "", reason, f"give {flag} continue")


def deterministic_asks_no_engine(c: RunConfig) -> Iterator[Fault]:
    if c.deterministic and c.kv_high_watermark is not None:
        reason = "when an engine is full depends on time, and --deterministic on nothing but the seed"
        yield Fault("--kv-high-watermark", f"{c.kv_high_watermark:g}", reason, "leave it out")


def slots_fill_a_step(c: RunConfig) -> Iterator[Fault]:
    """Fewer slots than an update interval's groups: no step could be filled, or none before the next version."""
    if c.schedule != "async":
        return
    needed = c.update_weights_interval * c.rollout_batch_size
    if c.slots < needed:
        flag = "--rollout-slots" if c.rollout_slots is not None else "--max-lead"
        value = c.rollout_slots if c.rollout_slots is not None else c.lead
        reason = (
            f"{c.slots} slots cannot hold the {needed} groups from one version to the next "
            f"(--update-weights-interval x --rollout-batch-size), with --rollout-window {c.window}"
        )
        yield Fault(flag, str(value), reason, "raise it, or lower the window")


def slots_keep_the_lead(c: RunConfig) -> Iterator[Fault]:
    if c.rollout_slots is None or c.schedule != "async":
        return
    bound = lead_bound(c.rollout_slots, c.window, c.rollout_batch_size, c.max_engine_lag)
    if bound > c.lead:
        reason = f"lets rollouts lead by {bound} steps, --max-lead is {c.lead}"
        yield Fault("--rollout-slots", str(c.rollout_slots), reason, f"give at most {c.most_slots}")


def checkpoints_meet_versions(c: RunConfig) -> Iterator[Fault]:
    """A run goes on from a checkpoint by publishing its weights: only a version that was made there anyway."""
    every = c.update_weights_interval
    if c.save_interval is not None and c.save_interval % every:
        reason = f"a version is made every {every} steps only, and a checkpoint has one"
        yield Fault("--save-interval", str(c.save_interval), reason, f"give a multiple of {every}")


def interval_is_fresh_enough(c: RunConfig) -> Iterator[Fault]:
    least = c.update_weights_interval - (c.schedule != "pipelined")
    if c.max_staleness < least and not c.fine_tunes:
        reason = f"--schedule {c.schedule} makes tokens of lag {least}, --max-staleness is {c.max_staleness}"
        remedy = f"give --max-staleness {least}"
        if c.update_weights_interval > 1:
            yield Fault("--update-weights-interval", str(c.update_weights_interval), reason, remedy)
        else:
            yield Fault("--max-staleness", str(c.max_staleness), reason, remedy)


def batch_outlasts_a_sample(c: RunConfig) -> Iterator[Fault]:
    longest = c.rollout_request_timeout_s + c.reward_timeout_s
    if c.rollout_timeout_s <= longest:
        reason = f"one sample may take {longest:g} s (--rollout-request-timeout-s + --reward-timeout-s)"
        yield Fault("--rollout-timeout-s", f"{c.rollout_timeout_s:g}", reason, "raise it")


def staleness_options_are_used(c: RunConfig) -> Iterator[Fault]:
    if c.staleness_policy != "mask" and c.min_unmasked_share != 0.5:
        reason = f"--staleness-policy {c.staleness_policy} masks no token"
        yield Fault(
            "--min-unmasked-share", f"{c.min_unmasked_share:g}", reason, "give --staleness-policy mask"
        )


def off_policy_options_are_used(c: RunConfig) -> Iterator[Fault]:
    if c.off_policy == "none":
        for flag, value in (
            ("--off-policy-clip", c.off_policy_clip),
            ("--off-policy-clip-low", c.off_policy_clip_low),
        ):
            if value is not None:
                yield Fault(flag, f"{value:g}", "there is no weight to bound", "give --off-policy")
    elif c.use_rollout_logprobs:
        reason = (
            f"the ratio to the engine's log-probs is a correction already, --off-policy is {c.off_policy}"
        )
        yield Fault("--use-rollout-logprobs", "", reason, "leave one of the two out")
    if c.prox_logp == "interpolate" and c.off_policy != "decoupled":
        reason = f"--off-policy {c.off_policy} has no proximal policy"
        yield Fault("--prox-logp", c.prox_logp, reason, "give --off-policy decoupled")


SCHEDULE_CHECKS = (
    only_async_leads,
    deterministic_is_ordered,
    deterministic_asks_no_engine,
    update_policy_fits,
    slots_fill_a_step,
    slots_keep_the_lead,
    checkpoints_meet_versions,
    interval_is_fresh_enough,
    batch_outlasts_a_sample,
    staleness_options_are_used,
    off_policy_options_are_used,
)
