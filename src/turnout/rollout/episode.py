"""Samples of several turns, made by a user's function (--custom-generate-function-path; docs/guides/multi-turn.md).

    async def generate(episode: Episode) -> None:
        turn = await episode.generate(stop=["</call>"])   # the model's turn
        episode.append(answer_to(turn.text))               # the environment's: in the context, without loss
        await episode.generate()

The response is what the turns and the environment said, in order, as exact token ids: nothing is decoded and
tokenised again. Promises: tokens of the environment have loss mask 0, log-prob 0 and the engine ENVIRONMENT, and
count as of the version that made the token before them; a sample ends by LENGTH where its tokens or turns are used
up, and fails where the function raises, is not done by the sample's deadline, whatever it does with its
cancellation, or goes on without a turn that it began; the turns of a sample find the engine that has their prefix.
A sample that was cut goes on: its function runs from the beginning, what exists is told again and not made again,
and where the environment now says something else, what it said then stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from turnout.core.errors import GenerateFailed, TurnoutError
from turnout.core.ports import Clock
from turnout.core.types import Finish, Prompt, Trajectory, but
from turnout.core.waits import Wait
from turnout.rollout.deadlines import Deadlines
from turnout.rollout.draft import Draft
from turnout.rollout.rewards import outcome
from turnout.rollout.sampler import Ask, Sampler
from turnout.rollout.stops import ended
from turnout.rollout.tokenizer import TokenizerLike

FUNCTION = "the generate function"
ENDS_S = 1.0  # for a function to end that was told to
UNENDED = (
    "the generate function went on while a turn had not ended: await each episode.generate() to its end, one at a "
    "time and without a limit of time (the sample's deadline is one)"
)


class EpisodeOver(TurnoutError):
    """The sample has ended: no turn can be made any more. A function lets it pass."""


@dataclass(frozen=True)
class Turn:
    """One turn of the model. `text` is without special tokens; `finish` is STOP, or LENGTH where the turn's tokens
    were used up."""

    text: str
    ids: tuple[int, ...]
    finish: Finish


Generate = Callable[["Episode"], Awaitable[float | None]]


class Episode:
    """One sample while its function makes it. One turn at a time."""

    def __init__(self, ask: Ask, draft: Draft, wait: Wait, turns: Turns) -> None:
        self._ask, self._draft, self._wait, self._turns = ask, draft, wait, turns
        self._works()
        self._end = turns.clock.now() + ask.plan.deadline_s
        self._at = 0  # how much of what exists was told to the function
        self._count = 0
        self.reward: float | None = None
        self.over: Finish | None = None
        self.turn: asyncio.Task[Finish] | None = None  # that has not ended as turns do

    @property
    def prompt(self) -> Prompt:
        return self._ask.prompt

    @property
    def left(self) -> int:
        """Tokens that the response may still get."""
        return self._ask.plan.left(len(self.prompt.token_ids), self._at)

    @property
    def context(self) -> int:
        """Tokens that the next turn follows."""
        return len(self.prompt.token_ids) + self._at

    async def generate(self, max_new_tokens: int | None = None, stop: Sequence[str] = ()) -> Turn:
        """The model's next turn, of at most so many tokens, ended by its end token or one of these texts besides
        those of the run. Raises EpisodeOver where the sample has no tokens or turns left, GenerateFailed where the
        turn before has not ended."""
        self._check(self.left > 0 and self._count < self._turns.most)
        self._count += 1
        draft, first, plan = self._draft, self._at, self._ask.plan
        last = draft.until_environment(first)
        params = plan.params
        most = params.max_new_tokens if max_new_tokens is None else first + max_new_tokens
        params = but(params, max_new_tokens=min(most, params.max_new_tokens), stop=(*params.stop, *stop))
        whole = last < len(draft.ids) or ended(self._turns.tokenizer, params, draft.ids, first)
        finish = Finish.STOP
        if not whole:
            draft.turn = first
            plan = but(plan, params=params, deadline_s=max(0.001, self._end - self._turns.clock.now()))
            work = self._turns.sampler.turn(but(self._ask, plan=plan), draft, self._wait)
            self.turn = asyncio.ensure_future(work)
            finish = await self.turn
            self.turn = None
            self._works()
            if finish is Finish.ABORT:
                self.over = finish
            self._check(self.over is None)
            last = len(draft.ids)
        self._at = last
        ids = tuple(draft.ids[first:last])
        if finish is Finish.LENGTH and self.left <= 0:
            self.over = finish
        return Turn(self._turns.tokenizer.decode(ids, skip_special_tokens=True), ids, finish)

    def begin(self, ids: Sequence[int]) -> None:
        """What the context begins with before the first turn, with the prompt's ids as its first. It carries no
        loss and does not count for the response. Raises GenerateFailed for ids that begin otherwise, EpisodeOver
        where they leave no room for a token."""
        known = self.prompt.token_ids
        if tuple(ids[: len(known)]) != known:
            raise GenerateFailed(
                f"its context begins with {list(ids[:4])}, the prompt with {list(known[:4])}"
            )
        draft, new = self._draft, ids[len(known) :]
        if not draft.ids:
            self._allow(len(new))
            self._check(len(new) < self.left)
            draft.begin(new)
        else:
            self._allow(draft.opening)
        self._at = draft.opening

    def _allow(self, tokens: int) -> None:
        """So many tokens more than the response's own."""
        plan = self._ask.plan
        params = but(plan.params, max_new_tokens=plan.params.max_new_tokens + tokens)
        self._ask = but(self._ask, plan=but(plan, params=params))

    def append(self, said: str | Sequence[int]) -> None:
        """What a tool, a user or the environment says after a turn, as text (special tokens by their names) or ids;
        what does not fit the sample is cut off. Raises ValueError before the first turn: that is the prompt's."""
        self._check(True)
        draft, first = self._draft, self._at
        if not first:
            raise ValueError("the first turn is the model's; what comes before it is the prompt")
        ids = self._turns.tokenizer.encode(said, special=False) if isinstance(said, str) else list(said)
        if first < len(draft.ids):
            again = draft.ids[first : first + len(ids)] == ids
            self._at = first + len(ids) if again else draft.until_model(first)
            return
        draft.append(ids[: max(0, self.left)])
        draft.report()
        self._at = len(draft.ids)

    def close(self) -> None:
        """No turn is made any more."""
        self.over = Finish.ABORT

    def check_turn(self) -> None:
        """Raises where a turn has not: its own fault, or GenerateFailed."""
        turn = self.turn
        if turn is None:
            return
        fault = turn.exception() if turn.done() and not turn.cancelled() else None
        raise GenerateFailed(UNENDED) if fault is None else fault

    def _works(self) -> None:
        """The function is at work."""
        self._wait.on, self._wait.what = FUNCTION, "its next turn or its end"
        self._wait.since = self._turns.clock.now()

    def _check(self, some_left: bool) -> None:
        if self.over is not Finish.ABORT:
            self.check_turn()
        if self.over is None and not some_left:
            self.over = Finish.LENGTH
        if self.over not in (None, Finish.LENGTH) or not some_left:
            raise EpisodeOver(f"the sample has ended by {self.over}")


class Turns:
    """Makes samples by a function, on the engines of `sampler`; in the place of a Sampler. `most`: turns of one
    sample."""

    def __init__(self, sampler: Sampler, generate: Generate, tokenizer: TokenizerLike, most: int) -> None:
        self.sampler, self.tokenizer, self.most = sampler, tokenizer, most
        self._generate = generate
        self._deadlines = Deadlines(self.clock)

    @property
    def clock(self) -> Clock:
        return self.sampler.clock

    async def sample(self, ask: Ask) -> Trajectory:
        """As Sampler.sample, with the reward that the function returned. Raises GenerateFailed for what the
        function does wrong."""
        session = f"{ask.begun.seed:016x}"
        rewards: list[float | None] = []
        try:
            made = await self.sampler.made(but(ask, session=session), partial(self._made, rewards))
        finally:
            self.sampler.forget(session)
        return but(made, reward=rewards[0]) if rewards and not made.partial else made

    async def _made(self, rewards: list[float | None], ask: Ask, draft: Draft, wait: Wait) -> Finish:
        episode = Episode(ask, draft, wait, self)
        task = asyncio.ensure_future(self._called(episode))
        try:
            in_time = await self._deadlines.ended(task, ask.plan.deadline_s)
        finally:
            episode.close()
            for work in (episode.turn, task):  # the function may wait for its turn
                if work is not None and not work.done():
                    work.cancel()
                    await self._deadlines.ended(work, ENDS_S)
        if not in_time:
            raise GenerateFailed(f"the generate function had not ended after {ask.plan.deadline_s:g} s")
        if task.cancelled():
            raise GenerateFailed("the generate function raised CancelledError")
        finish = task.result()
        if finish is Finish.STOP and len(draft.ids) == draft.opening:
            raise GenerateFailed("the generate function made no turn")
        rewards.append(episode.reward)
        return finish

    async def _called(self, episode: Episode) -> Finish:
        """How the sample ended, by the function's own return or because it could not go on."""
        try:
            episode.reward = _reward(await self._generate(episode))
        except TurnoutError as fault:
            if not isinstance(fault, EpisodeOver):
                raise
        except Exception as fault:  # a user's function may raise anything
            raise GenerateFailed(f"the generate function raised {type(fault).__name__}: {fault}") from fault
        episode.check_turn()
        return Finish.STOP if episode.over is None else episode.over


def _reward(returned: Any) -> float | None:
    """What a function says of its sample; None where it leaves that to the run's reward."""
    if returned is None:
        return None
    scored = outcome(returned)
    if scored.value is None:
        raise GenerateFailed(f"the generate function {scored.why}")
    return scored.value
