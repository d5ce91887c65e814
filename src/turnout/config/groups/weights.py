"""Options of weight updates: how a version reaches the engines."""

from __future__ import annotations

from typing import ClassVar, Literal

from turnout.config.option import PATH, Options, option


class WeightOptions(Options):
    title: ClassVar[str] = "Weight updates"

    update_weight_mode: Literal["full", "delta"] = option(
        "full", "What a version holds: all weights, or what changed since the last one."
    )
    update_weight_transport: Literal["disk", "tensor", "group", "checkpoint-engine", "follower"] = option(
        "disk",
        "Way of a version to the engines: disk, a checkpoint that they load; tensor, shared memory on this host; "
        "group, a broadcast over Gloo; checkpoint-engine, CUDA memory of this host to SGLang by MoonshotAI's "
        "protocol; follower, none: `turnout weights follow` beside each external engine brings it there, and an "
        "update waits for the proof of --min-engines.",
    )
    update_weight_encoding: Literal["indices", "deltas", "deltas_zstd", "packed", "ranked", "xor"] | None = (
        option(
            None,
            "How a delta on disk writes what changed (docs/guides/weights.md).",
            unset="packed; a group carries positions and values as they are",
        )
    )
    update_weight_disk_dir: str | None = option(
        None,
        "Folder that trainer and engines share, or an object store (s3://, gs://, az://) to which versions are "
        "copied for followers elsewhere. It belongs to one run.",
        unset="`weights` in the run directory",
        pattern=PATH,
    )
    update_weight_disk_keep_files: bool = option(
        False, "Keep every version. The two newest committed ones are kept otherwise."
    )
    follower_expiry: float = option(
        3600.0,
        "A follower that is silent for so long holds no version back any more.",
        unit="seconds",
        gt=0,
    )
    custom_update_weight_post_write_path: str | None = option(
        None,
        "Function called with the folder of each version before it is published: file.py:function.",
        unset="none",
        pattern=PATH,
    )
    custom_update_weight_pre_read_path: str | None = option(
        None,
        "Function that an embedded engine calls with a version's folder before it reads there: file.py:function.",
        unset="none",
        pattern=PATH,
    )
    update_weight_buffer_size: int = option(
        512 * 2**20,
        "Largest file or bucket of a version, and what sending one holds at a time (by tensor at most 64 MB); a "
        "larger tensor gets one of its own.",
        unit="bytes",
        ge=2**20,
    )
    min_engines: int | None = option(
        None,
        "Engines that an update needs. One that fails is fenced, and the run goes on as long as so many are left.",
        unset="all, or 1 with --use-fault-tolerance (of PD pairs 1 of each half)",
        ge=1,
    )
    max_engine_lag: int = option(
        0,
        "Train steps that an engine may be behind and still be asked; 0 in the schedules sync and pipelined.",
        ge=0,
    )
    trust_label: bool = option(
        False, "Believe an engine that can only name its weights, not prove them. Refused otherwise."
    )
    update_weight_timeout_s: float = option(
        120.0, "Deadline of one update, from publishing to the last attestation.", unit="seconds", gt=0
    )
    update_weight_retries: int | None = option(
        None,
        "How often an update that failed is tried again where the schedule can't go on without it.",
        unset="0, or 2 with --use-fault-tolerance",
        ge=0,
    )
    check_weight_update_equal: bool = option(
        False,
        "After every update, compare what engines digest anew from their live tensors with the trainer's root.",
    )
    digest_audit_interval: int = option(
        20,
        "Deltas move digests along; after so many updates trainer and engines compute them anew and compare.",
        unit="updates",
        ge=1,
    )
