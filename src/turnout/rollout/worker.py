"""From one prompt to one finished group: generate the samples, score them, decide about failed members.

Promises: a sample ends by its own deadline; an aborted sample is never scored and never trains; an unscored
one (grader failed, hung, gave NaN) is not a zero; a group with too few members left is a GroupFailed with the
reason, never a smaller group by accident. A group that was cut is made on from where its members stand: nothing
that exists is made again. Seeds derive from (seed, group, attempt, member), so neither order nor engine nor a cut
changes what is sampled.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from turnout.core.errors import EngineDead, EngineError, EngineRefused, GenerateFailed
from turnout.core.rng import SeedTree
from turnout.core.types import Prompt, RolloutGroup, Trajectory, but
from turnout.core.waits import EVALUATE, Waiting, Waits
from turnout.placement.tasks import Part, Parts
from turnout.rollout.cut import Cut
from turnout.rollout.draft import Draft
from turnout.rollout.rewards import RewardRunner, Scored
from turnout.rollout.sampler import Ask, SamplingPlan

Made = Trajectory | str | Scored  # a member; the last two say why there is none
__all__ = ["Forgotten", "Generator", "GroupFailed", "Members", "SamplingPlan"]


class GroupFailed(Exception):
    """A group that can't train; the text is the reason of its drop."""


class Samples(Protocol):
    """Who makes samples: a Sampler, or turnout.rollout.episode.Turns on top of one."""

    def sample(self, ask: Ask) -> Coroutine[Any, Any, Trajectory]: ...


class Members(Protocol):
    """Who keeps the members of one group while they are made, by their number in it."""

    def tokens(self, member: int, draft: Draft) -> None:
        """There are new tokens, to be had of the draft."""
        ...

    def ended(self, member: int, made: Trajectory) -> None:
        """The whole member, scored."""
        ...


class Forgotten:
    """Nobody keeps them."""

    def tokens(self, member: int, draft: Draft) -> None: ...

    def ended(self, member: int, made: Trajectory) -> None: ...


class Generator:
    """Makes groups on the engines of `sampler`, which take them in turn. `waits`: where it registers what they wait
    for (None: nobody asks)."""

    def __init__(self, sampler: Samples, rewards: RewardRunner, waits: Waits | None = None) -> None:
        self.sampler, self._rewards = sampler, rewards
        self.waits = Waits(lambda: 0.0) if waits is None else waits

    async def group(
        self,
        group: RolloutGroup,
        plan: SamplingPlan,
        seeds: SeedTree,
        members: Members | None = None,
        cut: Cut | None = None,
    ) -> RolloutGroup:
        """The group with its scored members, `group` holding those that exist (told apart by their seeds); a
        partial group (`RolloutGroup.partial`) where it was cut. Raises GroupFailed, or EngineDead when an engine is
        gone."""
        node = seeds.child("sample", group.ordinal, group.attempt)
        keep = Forgotten() if members is None else members
        cut = Cut() if cut is None else cut
        known = {made.seed: made for made in group.trajectories}
        asks, waits = [], self.waits.of(f"group {group.group_id}")
        for member, seed in enumerate(node.seeds(plan.samples)):
            begun = known[seed] if seed in known else Trajectory.unbegun(seed)
            journal = partial(keep.tokens, member)
            asks.append(Ask(group.prompt, plan, begun, group.ordinal, journal, cut, waits))
        made = await Parts[Made]().made(asks, partial(self._member, keep))
        made = await self._scored_together(group.prompt, made, keep, waits)
        kept = tuple(t for t in made if isinstance(t, Trajectory))
        if len(kept) < plan.min_group:
            unscored = [f"unscored: {t.why}" if isinstance(t, Scored) else t for t in made]
            reasons = sorted({t for t in unscored if isinstance(t, str)})
            raise GroupFailed(reasons[0] if reasons else "too few members")
        return replace(group, trajectories=kept)

    async def sample(self, prompt: Prompt, plan: SamplingPlan, seed: int, turn: int) -> Trajectory:
        """One unscored trajectory; `turn` chooses the engine that is asked first."""
        waits = self.waits.of(EVALUATE)
        return await self.sampler.sample(Ask(prompt, plan, Trajectory.unbegun(seed), turn, waits=waits))

    async def _member(self, keep: Members, part: Part[Made], ask: Ask) -> Made:
        """A scored trajectory, a partial one where it was cut, or why there is none."""
        made, member = ask.begun, part.at
        if made.partial:
            try:
                made = await self.sampler.sample(ask)
            except EngineDead:
                raise
            except EngineRefused as fault:
                return f"refused by the engine: {fault.reason}"
            except EngineError as fault:
                return f"engine: {fault.reason}"
            except GenerateFailed as fault:
                return str(fault)
            if made.partial:
                return made if ask.cut.made else "aborted by the engine"
            if made.reward is not None:  # of its own function
                keep.ended(member, made)
                return made
        elif made.reward is not None:
            return made
        if self._rewards.whole:
            keep.ended(member, made)
            return made
        with self._rewards.waited(ask.waits):
            scored = await self._rewards.score(ask.prompt, made, part)
        if scored.value is None:
            return scored
        made = but(made, reward=scored.value)
        keep.ended(member, made)
        return made

    async def _scored_together(
        self, prompt: Prompt, made: list[Made], keep: Members, waits: Waiting
    ) -> list[Made]:
        """The members of a group that is scored as a whole: once all of them have ended."""
        ended = [one for one in made if isinstance(one, Trajectory) and not one.partial]
        if not self._rewards.whole or len(ended) < len(made) or all(one.reward is not None for one in ended):
            return made
        with self._rewards.waited(waits):
            scores = await self._rewards.score_group(prompt, ended)
        scored: list[Made] = []
        for member, (one, score) in enumerate(zip(ended, scores)):
            if one.reward is not None:  # of its own function
                scored.append(one)
                continue
            if score.value is None:
                scored.append(score)
                continue
            scored.append(but(one, reward=score.value))
            keep.ended(member, but(one, reward=score.value))
        return scored
