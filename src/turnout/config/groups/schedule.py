"""Options of the schedule: how far rollouts lead, how old a trained token may be."""

from __future__ import annotations

from typing import ClassVar, Literal

from turnout.config.option import Options, option


class ScheduleOptions(Options):
    title: ClassVar[str] = "Schedule"

    schedule: Literal["sync", "pipelined", "async"] = option(
        "sync",
        "How far rollouts may run ahead of training: not at all; one step, drained before the weights change; or "
        "--max-lead steps, with requests in flight while the weights change.",
    )
    max_lead: int | None = option(
        None,
        "Train steps that rollouts of --schedule async may run ahead; sizes the slots.",
        unit="steps",
        unset="--max-staleness",
        ge=0,
    )
    max_staleness: int = option(
        2,
        "Greatest lag that a token may train with: train steps done when it trains less those done when its "
        "version was exported. In sync and pipelined it bounds only what partial rollouts and "
        "--update-weights-interval add.",
        unit="steps",
        ge=0,
    )
    staleness_policy: Literal["drop", "replay", "mask"] = option(
        "drop",
        "What becomes of a group with tokens over --max-staleness, which --max-lead above it or partial rollouts "
        "can bring: drop it; replay, its prompt is sampled anew; mask, those tokens carry no loss.",
    )
    min_unmasked_share: float = option(
        0.5,
        "With --staleness-policy mask: a sample of whose tokens less is left trains none of them, and its reward "
        "stays in the baseline of its group.",
        ge=0,
        le=1,
    )
    rollout_slots: int | None = option(
        None,
        "Groups that may be admitted and not yet part of a committed version, in --schedule async.",
        unit="groups",
        unset="as many as --max-lead allows",
        ge=1,
    )
    rollout_window: int | None = option(
        None,
        "Less 1: how many younger groups may be trained before a slow one, in --schedule async.",
        unit="groups",
        unset="half of --rollout-batch-size, 1 with --deterministic",
        ge=1,
    )
    rollout_max_concurrency: int | None = option(
        None,
        "Groups that may be in flight at once; the others wait for their turn in this process.",
        unit="groups",
        unset="all that have slots",
        ge=1,
    )
    kv_high_watermark: float | None = option(
        None,
        "Share of an engine's KV cache in use above which fewer groups may be in flight: three quarters of them, "
        "the newest are cut and go on later, until engines have room again. A queue longer than what runs counts "
        "as well.",
        unset="engines deal with it: they put requests back",
        gt=0,
        le=1,
    )
    update_weights_interval: int = option(
        1, "Train steps from one published version to the next.", unit="steps", ge=1
    )
    on_weight_update: Literal["drain", "abort", "retract", "continue"] | None = option(
        None,
        "What new weights do to requests in flight: wait for their end; end them at a token and have them go on "
        "from their tokens anew; have the engine compute their KV again on the new weights; or let them go on with "
        "the KV that they have.",
        unset="retract with --schedule async, drain with others and with --deterministic",
    )
    mask_kv_mixed: bool = option(
        False,
        "Tokens made on KV of older weights than their own (--on-weight-update continue) carry no loss.",
    )
    token_journal_interval: int = option(
        32,
        "Tokens of a sample that may be made before they are written to the ledger; at the latest after a second. "
        "What was written is never sampled again, whoever dies.",
        unit="tokens",
        ge=1,
    )
    rollout_timeout_s: float = option(
        3600.0,
        "Longest wait for the groups of one step; longer than --rollout-request-timeout-s and --reward-timeout-s "
        "together.",
        unit="seconds",
        gt=0,
    )
