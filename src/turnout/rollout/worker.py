"""From one prompt to one finished group: generate the samples, score them, decide about failed members.

Promises: a sample ends by its own deadline; an aborted sample is never scored and never trains; an unscored
one (grader failed, hung, gave NaN) is not a zero; a group with too few members left is a GroupFailed with the
reason, never a smaller group by accident. Seeds derive from (seed, group, attempt, member), so neither order
nor engine changes what is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from turnout.core.errors import EngineBusy, EngineDead, EngineError, EngineRefused
from turnout.core.ports import Clock
from turnout.core.rng import IdSource, SeedTree, random_id
from turnout.core.types import Finish, Prompt, RolloutGroup, Trajectory
from turnout.core.version import Runs, VersionSpans
from turnout.placement.tasks import together
from turnout.protocol.sglang import GenerateReply, GenerateRequest, SamplingParams
from turnout.rollout.rewards import RewardRunner
from turnout.serving.client import EngineClient

BUSY_PAUSE_S = 0.2
GONE_S = 2.0
Routes = Callable[[], Sequence[EngineClient]]


class Decoder(Protocol):
    """What the worker needs of a tokenizer."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...


@dataclass(frozen=True)
class SamplingPlan:
    """How a prompt is sampled. `deadline_s` bounds one sample from sending to answer; `min_group` is the
    smallest group that may train when members fail (the size itself: all or nothing)."""

    samples: int
    params: SamplingParams
    deadline_s: float
    min_group: int


class GroupFailed(Exception):
    """A group that can't train; the text is the reason of its drop."""


class Generator:
    """Makes trajectories and groups on engines. `routes` names those that may be asked now, in a fixed order; they
    take requests in turn by group."""

    def __init__(
        self,
        routes: Routes,
        rewards: RewardRunner,
        decoder: Decoder,
        clock: Clock,
        ids: IdSource = random_id,
    ) -> None:
        self._routes, self._rewards, self._decoder, self._clock = routes, rewards, decoder, clock
        self._ids = ids
        self.tokens_made = 0

    async def group(self, group: RolloutGroup, plan: SamplingPlan, seeds: SeedTree) -> RolloutGroup:
        """The group with its scored members; raises GroupFailed, or EngineDead when an engine is gone."""
        node = seeds.child("sample", group.ordinal, group.attempt)
        made = await together(
            self._member(group.prompt, plan, node.child(member).seed, group.ordinal)
            for member in range(plan.samples)
        )
        kept = tuple(t for t in made if isinstance(t, Trajectory))
        if len(kept) < plan.min_group:
            reasons = sorted({str(t) for t in made if not isinstance(t, Trajectory)})
            raise GroupFailed(reasons[0] if reasons else "too few members")
        return replace(group, trajectories=kept)

    async def sample(self, prompt: Prompt, plan: SamplingPlan, seed: int, turn: int) -> Trajectory:
        """One unscored trajectory; `turn` chooses the engine. EngineBusy is tried again until the deadline; where
        an engine is gone and another may be asked, that one makes the same sample."""
        params = replace(plan.params, sampling_seed=seed)
        end = self._clock.now() + plan.deadline_s
        while True:
            engines = self._routes()
            engine = engines[turn % len(engines)]
            request = GenerateRequest(self._ids(), prompt.token_ids, params, extra_key=engine.version)
            try:
                reply = await self._answered(engine, request, max(0.001, end - self._clock.now()))
                break
            except EngineDead:
                if not await self._fenced(engine, end):
                    raise
        self.tokens_made += len(reply.output_ids)
        return self._trajectory(reply, engine.engine_id, seed)

    async def _fenced(self, engine: EngineClient, end: float) -> bool:
        """Whether an engine that seems gone is fenced within a while: who watches it decides, not one request."""
        end = min(end, self._clock.now() + GONE_S)
        while engine in self._routes():
            if self._clock.now() + BUSY_PAUSE_S >= end:
                return False
            await self._clock.sleep(BUSY_PAUSE_S)
        return True

    async def _answered(
        self, engine: EngineClient, request: GenerateRequest, deadline_s: float
    ) -> GenerateReply:
        end = self._clock.now() + deadline_s
        while True:
            try:
                return await engine.generate(request, max(0.001, end - self._clock.now()))
            except EngineBusy:
                if self._clock.now() + BUSY_PAUSE_S >= end:
                    raise
                await self._clock.sleep(BUSY_PAUSE_S)

    def _trajectory(self, reply: GenerateReply, engine_id: str, seed: int) -> Trajectory:
        count = len(reply.output_ids)
        spans = VersionSpans()
        for tokens, label in reply.spans:
            spans = spans.extended(tokens, label)
        return Trajectory(
            response_ids=reply.output_ids,
            logprobs=reply.logprobs,
            loss_mask=(1,) * count,
            spans=spans,
            finish=reply.finish,
            text=self._decoder.decode(reply.output_ids, skip_special_tokens=True),
            engines=Runs().extended(count, engine_id),
            seed=seed,
        )

    async def _member(self, prompt: Prompt, plan: SamplingPlan, seed: int, turn: int) -> Trajectory | str:
        """A scored trajectory, or why there is none."""
        try:
            made = await self.sample(prompt, plan, seed, turn)
        except EngineDead:
            raise
        except EngineRefused as fault:
            return f"refused by the engine: {fault.reason}"
        except EngineError as fault:
            return f"engine: {fault.reason}"
        if made.finish is Finish.ABORT:
            return "aborted by the engine"
        scored = await self._rewards.score(prompt.text, made.text, prompt.label, prompt.metadata)
        if scored.value is None:
            return f"unscored: {scored.why}"
        return replace(made, reward=scored.value)
