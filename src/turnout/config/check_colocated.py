"""What giving memory back between phases goes together with. Rules as in turnout.config.checks.

Trainer and engines take turns on the memory: whatever has both at work at once is refused, with what is legal
beside it. The switches are about memory, not about devices: each is legal alone, with --colocate and without.
"""

from __future__ import annotations

from collections.abc import Iterator

from turnout.config.run_config import RunConfig
from turnout.core.errors import Fault

STAYS = "leave it out: both halves stay in memory"


def _switch(c: RunConfig) -> str:
    """The flag that was given, of a run that gives memory back; empty for others."""
    named = (
        ("--offload", c.offload),
        ("--offload-train", c.offload_train),
        ("--offload-rollout", c.offload_rollout),
    )
    return next((flag for flag, given in named if given), "")


def only_sync_takes_turns(c: RunConfig) -> Iterator[Fault]:
    if c.schedule != "sync" and (flag := _switch(c)):
        reason = f"--schedule {c.schedule} samples while it trains, so both are at work at once"
        remedy = f"use --schedule sync, for long samples with --partial-rollout, or {STAYS}"
        yield Fault(flag, "", reason, remedy)


def every_step_has_a_version(c: RunConfig) -> Iterator[Fault]:
    if c.schedule == "sync" and c.update_weights_interval > 1 and (flag := _switch(c)):
        every = c.update_weights_interval
        reason = (
            f"samples are made beside training, with versions {every} steps apart (--update-weights-interval)"
        )
        yield Fault(flag, "", reason, f"give --update-weights-interval 1, or {STAYS}")


def released_engines_load_whole(c: RunConfig) -> Iterator[Fault]:
    if c.offloads_rollout and c.update_weight_mode == "delta":
        reason = "an engine that gave its weights back holds nothing that a delta is relative to"
        remedy = "give --update-weight-mode full, or --offload-train alone"
        yield Fault("--update-weight-mode", "delta", reason, remedy)


def there_are_turns(c: RunConfig) -> Iterator[Fault]:
    if c.debug_rollout_only and (flag := _switch(c)):
        yield Fault(
            flag,
            "",
            "nothing is trained, so engines keep their memory",
            "leave it out, or --debug-rollout-only",
        )
    elif not c.asks_engines and (flag := _switch(c)):
        reason = "the run has no engines, so there is nobody to take turns with"
        yield Fault(flag, "", reason, "leave it out, or give --eval-prompt-data")


def nothing_is_saved_beside(c: RunConfig) -> Iterator[Fault]:
    if c.async_save and c.offloads_train:
        reason = "the trainer gives its memory back, and a checkpoint beside it is a copy of that"
        yield Fault("--async-save", "", reason, f"leave it out, or {_switch(c)}")


def halves_can_give_back(c: RunConfig) -> Iterator[Fault]:
    """Ranks beside the controller, and embedded engines, that serve while nobody trains."""
    if c.offloads_train and c.ranks_in_cluster:
        flag = "--offload-train" if c.offload_train else "--offload"
        reason = "what ranks give back would lie in the run directory, which the nodes of the cluster share"
        yield Fault(flag, "", reason, "leave it out, or give --cluster local")
    if not c.offloads_rollout:
        return
    flag = "--offload-rollout" if c.offload_rollout else "--offload"
    remedy = "give --offload-train alone"
    if c.external:
        yield Fault(flag, "", "the memory of engines that somebody else runs is theirs", remedy)
    elif c.cluster == "ray":
        reason = "what engines of a Ray cluster hold is not measured from here"
        yield Fault(flag, "", reason, f"give --cluster local, or {remedy}")
    elif "sglang" in c.programs:
        reason = "SGLang gives nothing back on a CPU, and on a GPU that is not yet measured"
        yield Fault(flag, "", reason, f"use --engine embedded, or {remedy}")
    elif c.eval_mode == "dedicated":
        reason = "engines of their own evaluate beside training (--eval-mode dedicated)"
        yield Fault(flag, "", reason, f"use another --eval-mode, or {remedy}")


COLOCATED_CHECKS = (
    only_sync_takes_turns,
    every_step_has_a_version,
    released_engines_load_whole,
    there_are_turns,
    nothing_is_saved_beside,
    halves_can_give_back,
)
