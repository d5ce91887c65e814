"""Rewards: from a name or import path to a function, and from a call to a score or the reason for none.

A reward is `reward(prompt, response, label, **metadata) -> float`, sync or async. Metadata keys that a function
without ** does not name are left out, and so are keys called prompt, response or label. One that names a parameter
`run` is given the run's models there (turnout.serving.models), one that names `completion_ids` the response's token
ids, in place of metadata of that name.

Outcomes of a call. A finite number (also a bool or a NumPy scalar) is the score. Everything else is unscored,
with the reason, and never a silent 0: None; NaN; infinite; text, also text that looks like a number; a dict,
also {"score": 1} (return its number); any other object; an exception; a call past its deadline.

Sync functions run in daemon threads off the event loop, at most `workers` at a time; the deadline counts from
the start of the call, not from its turn. A thread past its deadline cannot be stopped: it is left behind and
another takes its place, up to `workers` left behind; from then on calls are unscored at once, and say why.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from turnout.core.errors import ConfigError, Fault
from turnout.core.imports import load_function
from turnout.core.ports import Clock
from turnout.core.record import record
from turnout.core.types import Prompt, Trajectory
from turnout.core.waits import Wait, Waiting
from turnout.placement.call_threads import CallThreads
from turnout.placement.tasks import Part, Parts
from turnout.rollout.builtin_rewards import BUILTIN, UNLISTED
from turnout.rollout.deadlines import Limit
from turnout.serving.models import Models

Reward = Callable[..., Any]
DEFAULT_DEADLINE_S = 30.0
DEFAULT_WORKERS = 8
_OWN_NAMES = ("prompt", "response", "label")
_RUNS_NAMES = {"run", "completion_ids"}  # given by the run to who names them
_FLAG = "--custom-rm-path"


@record
class Scored:
    """A score, or None and why there is none."""

    value: float | None
    why: str = ""


def load_reward(text: str) -> Reward:
    """A built-in by name, else a function by import path (turnout.core.imports). Raises ConfigError."""
    if text in UNLISTED:
        return UNLISTED[text]
    if text in BUILTIN:
        return BUILTIN[text]
    if not re.search(r".[:.].", text):
        known = ", ".join(BUILTIN)
        raise ConfigError(Fault(_FLAG, text, "is no reward", f"one of {known}, or module:function"))
    function = load_function(_FLAG, text)
    try:
        inspect.signature(function).bind_partial(None, None, None)
    except TypeError:
        raise ConfigError(
            Fault(
                _FLAG,
                text,
                "cannot be called with three arguments",
                "define it (prompt, response, label, **metadata); one written for TRL goes to --trl-rewards",
            )
        ) from None
    return function


class RewardRunner:
    """Calls one reward under deadlines. Async ones run in the event loop, as many as trajectories ask for.
    `models`: those of the run, for a reward that asks them; none unless somebody sets it."""

    def __init__(
        self,
        reward: Reward,
        clock: Clock,
        deadline_s: float = DEFAULT_DEADLINE_S,
        workers: int = DEFAULT_WORKERS,
        whole: bool = False,
    ) -> None:
        """`whole`: the reward scores all responses of a group at once (`score_group`), and no single one."""
        self._reward = reward
        name = getattr(reward, "__qualname__", type(reward).__qualname__)
        self._name = f"reward {reward.__module__}:{name}"
        self.whole = whole
        self.models = Models({})
        self._clock = clock
        self._deadline_s = deadline_s
        self._workers = workers
        self._limit = Limit(clock, deadline_s, self._late)
        self._turns = asyncio.Semaphore(workers)
        self._threads = CallThreads("reward")
        self._is_async = inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(
            getattr(reward, "__call__", None)  # noqa: B004 - the method is wanted, to see whether it is async
        )
        self._begins_itself: bool = getattr(
            reward, "begins_itself", False
        )  # says itself when its call begins
        self._named, self._given = _named_parameters(reward)

    def of(self, reward: Reward | None) -> RewardRunner:
        """Another reward under the same limits; this one where None is given."""
        if reward is None:
            return self
        other = RewardRunner(reward, self._clock, self._deadline_s, self._workers)
        other.models = self.models
        return other

    def waited(self, waits: Waiting) -> Wait:
        """Who waits for a call of the reward, while the block runs."""
        return waits(self._name, "its score", self._deadline_s)

    @property
    def left_behind(self) -> int:
        """Threads that are still in a call past its deadline."""
        return self._threads.left_behind

    async def score(self, prompt: Prompt, made: Trajectory, part: Part[Any] | None = None) -> Scored:
        """The score of one response. Never raises for what the reward does; see the module's outcomes. `part`: the
        caller's own, in whose task the reward runs; past the deadline it is left with that outcome. Without one the
        call gets a task of its own."""
        call = self._bound(prompt, made.text, made.response_ids[made.opening :])
        got = await (self._alone(call) if part is None else self._in_part(part, call))
        return got if isinstance(got, Scored) else outcome(got)

    async def score_group(self, prompt: Prompt, made: Sequence[Trajectory]) -> list[Scored]:
        """The scores of all responses of a group, in order, by one call under one deadline. An answer that is no
        list of as many values is the outcome of each."""
        responses = [one.text for one in made]
        got = await self._alone(
            self._bound(prompt, responses, [one.response_ids[one.opening :] for one in made])
        )
        if isinstance(got, Scored):
            return [got] * len(responses)
        if not isinstance(got, list | tuple) or len(got) != len(responses):
            size = f" of {len(got)}" if isinstance(got, list | tuple) else ""
            what = f"returned {type(got).__name__}{size}, not a list of {len(responses)} numbers"
            return [Scored(None, what)] * len(responses)
        return [outcome(value) for value in got]

    def _bound(self, asked: Prompt, response: Any, ids: Any) -> Callable[..., Any]:
        """The reward with what it is given."""
        named = self._named
        given = {
            k: v for k, v in asked.metadata.items() if k not in _OWN_NAMES and (named is None or k in named)
        }
        if "run" in self._given:
            given["run"] = self.models
        if "completion_ids" in self._given:
            given["completion_ids"] = ids
        return partial(self._reward, asked.text, response, asked.label, **given)

    async def _alone(self, call: Callable[..., Any]) -> Any:
        return (await Parts[Any]().made((call,), self._in_part))[0]

    async def _in_part(self, part: Part[Any], call: Callable[..., Any]) -> Any:
        """What the reward returned; a Scored without a value where it did not. Its task is that of the part, which
        it may hold on to: nobody waits for it past its deadline, or where the part is cancelled."""
        part.loose = True
        try:
            if not self._is_async:
                return await self._on_thread(part, call)
            if self._begins_itself:
                return await call(begins=partial(self._limit.begin, part))
            self._limit.begin(part)
            return await call()
        except asyncio.CancelledError:
            if part.cancelled:
                raise
            return Scored(None, "raised CancelledError")
        except Exception as fault:  # noqa: BLE001 - whatever a user's function raises is an outcome
            return Scored(None, f"raised {type(fault).__name__}: {fault}")
        finally:
            part.loose = False
            self._limit.end(part)
            if part.left:  # also where it returned in spite of its cancellation
                raise asyncio.CancelledError

    async def _on_thread(self, part: Part[Any], call: Callable[..., Any]) -> Any:
        async with self._turns:
            if self.left_behind >= self._workers:
                return Scored(None, f"not called: {self.left_behind} earlier calls never came back")
            self._limit.begin(part)
            result = await self._threads.done(call)
            return await result if isinstance(result, Awaitable) else result

    def _late(self, part: Part[Any]) -> None:
        part.leave(Scored(None, f"no answer within {self._deadline_s:g} s"))


def outcome(result: Any) -> Scored:
    """What a returned value is worth; see the module."""
    if isinstance(result, np.bool_):
        result = bool(result)
    if result is None:
        return Scored(None, "returned None")
    if isinstance(result, str):
        return Scored(None, f"returned the text {result[:40]!r}, not a number")
    if not isinstance(result, numbers.Real):
        return Scored(None, f"returned {type(result).__name__}, not a number")
    value = float(result)
    return Scored(value) if math.isfinite(value) else Scored(None, f"returned {value}")


def _named_parameters(reward: Reward) -> tuple[set[str] | None, set[str]]:
    """The names that a reward takes, None where it takes any (**metadata); and those of _RUNS_NAMES that it
    names."""
    try:
        parameters = inspect.signature(reward).parameters.values()
    except ValueError:  # a C function without a signature
        return set(), set()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = set(named) - set(positional[:3])
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters) else names, names & _RUNS_NAMES
