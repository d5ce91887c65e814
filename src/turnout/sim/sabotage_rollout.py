"""Wrong functions for the guards of groups, tokens, ledger and schedule (turnout.sim.sabotage)."""

# ruff: noqa: ARG005 - a wrong function takes what the real one takes

from __future__ import annotations

from dataclasses import replace
from typing import Any

from turnout.core.types import Finish, RolloutGroup, Trajectory
from turnout.protocol.sglang import GenerateRequest
from turnout.rollout import book, sampler
from turnout.rollout.buffer import WindowBuffer
from turnout.rollout.draft import Draft
from turnout.rollout.journal import TokenJournal
from turnout.rollout.ledger import Ledger
from turnout.rollout.ledger_read import LedgerReader
from turnout.rollout.pool import RolloutPool
from turnout.rollout.rewards import RewardRunner, Scored
from turnout.rollout.sampler import Sampler, SamplingPlan
from turnout.rollout.staleness import Fate
from turnout.rollout.worker import Generator
from turnout.rollout.workers import Workers
from turnout.schedule import lag
from turnout.schedule.lag import LagGate
from turnout.sim.sabotage_weights import Sabotage


def _attempt_stays(_real: Any) -> Any:
    return lambda row, prompt: RolloutGroup(row.group_id, row.ordinal, row.attempt, prompt)


def _wakes_nobody(_real: Any) -> Any:
    return lambda self: None


def _without_namespace(_real: Any) -> Any:
    return lambda rid, ids, params, **_: GenerateRequest(rid, ids, params)


def _no_window(_real: Any) -> Any:
    return property(lambda self: len(self._complete))


def _abort_is_a_stop(real: Any) -> Any:
    async def ended(self: Any, finish: Finish, draft: Any, end: float) -> Finish:
        found: Finish = await real(self, Finish.STOP if finish is Finish.ABORT else finish, draft, end)
        return found

    return ended


def _whole_budget(_real: Any) -> Any:
    return lambda self, prompt, made: self.params.max_new_tokens


def _mask_stays(real: Any) -> Any:
    def extend(self: Any, new: Any) -> Any:
        self._keep_marks()
        before = len(self._mask)
        stays = real(self, new)
        del self._mask[before:]
        return stays

    return extend


def _one_step_younger(real: Any) -> Any:
    return lambda self, groups, steps_done: real(self, groups, steps_done - 1)


def _begins_anew(real: Any) -> Any:
    return lambda begun, desk, *rest: real(Trajectory.unbegun(begun.seed), desk, *rest)


def _one_member_less(real: Any) -> Any:
    async def group(self: Any, *given: Any) -> Any:
        made = await real(self, *given)
        return made if made.partial else replace(made, trajectories=made.trajectories[:-1])

    return group


def _frees_twice(real: Any) -> Any:
    def drop(self: Any, key: str, reason: str) -> None:
        real(self, key, reason)
        self.open.charged -= 1

    return drop


def _restores_without_slots(real: Any) -> Any:
    def restore(self: Any, returning: Any, step: int) -> None:
        real(self, returning, step)
        self._open.charged = 0

    return restore


async def _drained(_self: Any) -> None:
    """Whatever is in flight."""


def _unscored_is_zero(real: Any) -> Any:
    async def score(self: Any, *given: Any) -> Scored:
        found: Scored = await real(self, *given)
        return Scored(0.0) if found.value is None else found

    return score


def _cut_loses_its_slot(real: Any) -> Any:
    def cut_one(self: Any, group: RolloutGroup) -> None:
        real(self, group)
        self.open.charged -= 1

    return cut_one


def _replays_and_keeps(real: Any) -> Any:
    def judge(group: RolloutGroup, *given: Any) -> Any:
        found = real(group, *given)
        return replace(found, fate=Fate.KEEP, group=group) if found.fate is Fate.REPLAY else found

    return judge


ROLLOUT_SABOTAGES: dict[str, Sabotage] = {
    "attempt-not-raised": Sabotage(
        "a requeued prompt keeps its attempt", book, "next_attempt", _attempt_stays
    ),
    "lost-wake-up": Sabotage(
        "who waits for groups is not told of new ones", RolloutPool, "changed", _wakes_nobody
    ),
    "prefix-cache-not-namespaced": Sabotage(
        "KV of all versions is one cache", sampler, "GenerateRequest", _without_namespace
    ),
    "window-not-enforced": Sabotage(
        "any number of groups overtakes a slow one", WindowBuffer, "ready_count", _no_window
    ),
    "abort-read-as-stop": Sabotage("an aborted sample has ended", Sampler, "_ended", _abort_is_a_stop),
    "budget-not-reduced": Sabotage(
        "a resumed sample gets its whole budget again", SamplingPlan, "left", _whole_budget
    ),
    "mask-not-extended": Sabotage("new tokens get no mask", Draft, "extend", _mask_stays),
    "lag-off-by-one": Sabotage("the gate counts one step less", LagGate, "judge", _one_step_younger),
    "resume-forgets-tokens": Sabotage("a resumed sample begins anew", sampler, "Draft", _begins_anew),
    "member-missing": Sabotage("a group lacks a member", Generator, "group", _one_member_less),
    "double-refill": Sabotage("a dropped group frees two slots", Workers, "drop", _frees_twice),
    "restored-without-slots": Sabotage(
        "groups of a resume take no slots", RolloutPool, "restore", _restores_without_slots
    ),
    "partial-loses-its-slot": Sabotage(
        "a group that was cut frees its slot", Workers, "_cut_one", _cut_loses_its_slot
    ),
    "replay-keeps-tokens": Sabotage(
        "a group that is too old for training trains instead of beginning anew",
        lag,
        "judge",
        _replays_and_keeps,
    ),
    "drain-ignores-in-flight": Sabotage(
        "a drain waits for nothing", RolloutPool, "drain", lambda _: _drained
    ),
    "unscored-is-zero": Sabotage("a reward that fails is 0", RewardRunner, "score", _unscored_is_zero),
    "batch-not-recorded": Sabotage(
        "a batch is not written", Ledger, "put_batch", lambda _: lambda self, step, ids: None
    ),
    "rollback-misses-trained": Sabotage(
        "a resume forgets groups that trained after its checkpoint",
        LedgerReader,
        "trained_since",
        lambda _: lambda self, step: [],
    ),
    "position-not-restored": Sabotage(
        "a resume takes prompts from the first on", LedgerReader, "next_ordinal", lambda _: lambda self: 0
    ),
    "journal-not-forgotten": Sabotage(
        "tokens of a complete group are journalled", TokenJournal, "forget", lambda _: lambda self, key: None
    ),
}
