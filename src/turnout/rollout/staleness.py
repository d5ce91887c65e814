"""Verdicts on old tokens: what becomes of a group that holds tokens over `--max-staleness`. Pure.

Lag of a token: train steps done when it trains, less train steps done when its version was exported. Only tokens
that may train (loss mask 1) are judged. A version that was published here but never became current has no lag: its
update failed, or the run went back behind it; its tokens count as over every bound. Over the bound S:

    drop     the group ends, with the lag as its reason
    replay   its prompt goes back to the source as a new attempt, MAX_ATTEMPTS in all; its tokens are gone
    mask     those tokens carry no loss; a member with too few tokens left trains none of them, and its reward stays
             in the group's baseline. A group of which nothing is left is dropped: it would take a place for nothing

Promises: a group without a token over S is kept as it is (the same object); after the verdict no token of what
trains is over S, or of a version that was never current; a version that was never published here raises.
Importance weights are no verdict: turnout.train.off_policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from turnout.core.errors import InvariantBroken
from turnout.core.events import STALE
from turnout.core.record import record
from turnout.core.types import RolloutGroup, Trajectory

MAX_ATTEMPTS = 8
NEVER = 1 << 30  # the lag of a token whose version never became current
Exports = Mapping[
    str, int | None
]  # train steps done at the export of each published version; None: never current
Tokens = Mapping[str, int]  # how many trainable tokens of a group each version made, by its label


class Fate(StrEnum):
    KEEP = "keep"
    MASK = "mask"
    REPLAY = "replay"
    DROP = "drop"


@dataclass(frozen=True)
class StalenessPolicy:
    """`max_staleness` is S, `over` what happens above it. With `mask`, `min_unmasked_share` is the least share of a
    member's trainable tokens that must be left; with less, none of them trains."""

    max_staleness: int
    over: Fate = Fate.DROP
    min_unmasked_share: float = 0.5


@record
class Verdict:
    """What becomes of a group. `lag` is the greatest lag of its trainable tokens, that which decided; `group` is
    what may train (KEEP, MASK), `trained` the trainable tokens that it has, `masked` counts those that it lost,
    `reason` says why it may not."""

    fate: Fate
    lag: int
    group: RolloutGroup
    trained: Tokens
    masked: int = 0
    reason: str = ""

    @property
    def evicted(self) -> bool:
        """The group leaves its batch, and another one takes its place."""
        return self.fate in (Fate.DROP, Fate.REPLAY)


def token_lags(member: Trajectory, exported_at: Exports, steps_done: int) -> tuple[int, ...]:
    """Lag of each response token, [T]. Raises InvariantBroken where a trainable one is of a version that was never
    published here; a masked one counts as NEVER."""
    lags: tuple[int, ...] = ()
    for tokens, label in member.spans.runs:
        exported, first = exported_at.get(label), len(lags)
        if exported is not None:
            lag = steps_done - exported
        elif any(member.loss_mask[first : first + tokens]):
            lag = lag_of(label, exported_at, steps_done)
        else:
            lag = NEVER
        lags += (lag,) * tokens
    return lags


def lag_of(label: str, exported_at: Exports, steps_done: int) -> int:
    """The lag of tokens of this version. Raises InvariantBroken where it was never published here."""
    exported = exported_at.get(label)
    if exported is not None:
        return steps_done - exported
    if label not in exported_at:
        raise InvariantBroken(f"tokens of {label}, never published here")
    return NEVER


def greatest_lag(group_id: str, labels: Iterable[str], exported_at: Exports, steps_done: int) -> int:
    """The greatest lag of these versions, those of a group's trainable tokens; 0 where there are none. Raises as
    `lag_of` does, naming the group."""
    try:
        return max([lag_of(label, exported_at, steps_done) for label in labels], default=0)
    except InvariantBroken as fault:
        raise InvariantBroken(f"group {group_id} holds {fault}") from None


def too_old(lag: int, policy: StalenessPolicy) -> str:
    """Why a group with this lag may not train."""
    if lag < NEVER:
        return f"lag {lag}, --max-staleness {policy.max_staleness}"
    return "made by a version that never became current"


def trained_tokens(group: RolloutGroup) -> Tokens:
    """How many of the group's trainable tokens each version made; versions of none are left out."""
    counted: dict[str, int] = {}
    for member in group.trajectories:
        mask, first = member.loss_mask, 0
        for tokens, label in member.spans.runs:
            part = mask if tokens == len(mask) else mask[first : first + tokens]
            first += tokens
            if trained := part.count(1):
                counted[label] = counted.get(label, 0) + trained
    return counted


def judge(group: RolloutGroup, exported_at: Exports, steps_done: int, policy: StalenessPolicy) -> Verdict:
    """The verdict on a completed group that would train as step `steps_done` (counted from 0).

    Raises InvariantBroken, naming the group, where a trainable token's version was never published here.
    """
    trained = trained_tokens(group)
    lag = greatest_lag(group.group_id, trained, exported_at, steps_done)
    if lag <= policy.max_staleness:
        return Verdict(Fate.KEEP, lag, group, trained)
    why = too_old(lag, policy)
    if policy.over is Fate.REPLAY and group.attempt + 1 >= MAX_ATTEMPTS:
        return Verdict(Fate.DROP, lag, group, {}, reason=f"{STALE}{why}, in attempt {group.attempt + 1}")
    if policy.over is not Fate.MASK:
        return Verdict(policy.over, lag, group, {}, reason=f"{STALE}{why}")
    members = [_masked(t, token_lags(t, exported_at, steps_done), policy) for t in group.trajectories]
    masked = replace(group, trajectories=tuple(members))
    left = trained_tokens(masked)
    if not left:
        return Verdict(Fate.DROP, lag, group, {}, reason=f"{STALE}no token is left, {why}")
    return Verdict(Fate.MASK, lag, masked, left, sum(trained.values()) - sum(left.values()))


def trained_lags(groups: Iterable[Tokens], exported_at: Exports, steps_done: int) -> Counter[int]:
    """How many trainable tokens of the groups have which lag."""
    counted: Counter[int] = Counter()
    for made in groups:
        for label, tokens in made.items():
            counted[lag_of(label, exported_at, steps_done)] += tokens
    return counted


def _masked(member: Trajectory, lags: tuple[int, ...], policy: StalenessPolicy) -> Trajectory:
    """The member without loss on tokens over the bound, or on any where too few are left."""
    mask = tuple(m if lag <= policy.max_staleness else 0 for m, lag in zip(member.loss_mask, lags))
    if sum(mask) < policy.min_unmasked_share * sum(member.loss_mask):
        mask = (0,) * len(mask)
    return member if mask == member.loss_mask else replace(member, loss_mask=mask)
