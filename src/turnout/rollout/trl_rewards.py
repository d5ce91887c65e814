"""Reward functions written for TRL's GRPOTrainer, called as that calls them (--trl-rewards; docs/guides/agents.md).

    def accuracy(prompts, completions, completion_ids, answer, **kwargs) -> list of numbers or None

Everything goes by keyword and as a list with an item for each response: `prompts` and `completions` (texts, or
lists of messages where the row's prompt is one), `completion_ids`, and every column of the row but prompt,
completion and completion_ids. Functions may be async; several are summed by their weights. Promises: None is no
part of the sum, and a response for which all functions say None is unscored, as is anything else that is no finite
number; each function has rows of its own. There is no `trainer_state` here; `log_extra` and `log_metric` take what
they are given and keep nothing.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from turnout.core.errors import ConfigError, Fault
from turnout.core.imports import load_function
from turnout.placement.call_threads import CallThreads
from turnout.placement.tasks import together
from turnout.rollout.rewards import DEFAULT_WORKERS, outcome

FLAG = "--trl-rewards"
OWN = ("prompt", "prompts", "completion", "completions", "completion_ids")
Function = Callable[..., Any]


def load_trl_rewards(weights: Mapping[str, float], input_keys: Sequence[str]) -> TrlRewards:
    """The functions by their import paths, for rows that have their prompt under the first of these keys that they
    have; raises ConfigError."""
    functions: list[tuple[Function, float]] = []
    for path, weight in weights.items():
        function = load_function(FLAG, path)
        needed = {
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
        if "trainer_state" in needed:
            reason = "it needs a trainer_state, and there is no such trainer here"
            raise ConfigError(Fault(FLAG, path, reason, "give that parameter a default"))
        functions.append((function, float(weight)))
    return TrlRewards(functions, input_keys)


def _keeps_nothing(*_given: Any, **_named: Any) -> None:
    """In the place of TRL's log_extra and log_metric."""


class TrlRewards:
    """A reward as turnout.rollout.rewards calls it, of one response or, with --group-rm, of a group. Calls of
    functions that are not async wait for their turn, before their deadline begins."""

    begins_itself = True

    def __init__(self, functions: Sequence[tuple[Function, float]], input_keys: Sequence[str]) -> None:
        self._functions = sorted(functions, key=lambda one: inspect.iscoroutinefunction(one[0]))
        self._input_keys = input_keys
        self._threads, self._turns = CallThreads("reward"), asyncio.Semaphore(DEFAULT_WORKERS)

    async def __call__(
        self,
        *asked: Any,  # prompt, response, label
        completion_ids: Any = (),
        row: dict[str, Any],
        begins: Callable[[], None] = _keeps_nothing,
    ) -> Any:
        prompt, response, _label = asked
        whole = isinstance(response, list)
        said = response if whole else [response]
        ids = completion_ids if whole else [completion_ids]
        calls = [
            partial(function, **_taken(function, self._arguments(prompt, said, ids, row)))
            for function, _ in self._functions
        ]
        loop = [call for call in calls if inspect.iscoroutinefunction(call.func)]
        threads = calls[: len(calls) - len(loop)]
        first, *others = await together([self._on_threads(threads, begins), *(call() for call in loop)])
        answers = [_listed(call.func, got, len(said)) for call, got in zip(calls, [*first, *others])]
        sums = [self._sum([rows[at] for rows in answers]) for at in range(len(said))]
        return sums if whole else sums[0]

    def _arguments(
        self, prompt: str, said: list[str], ids: Sequence[Sequence[int]], row: dict[str, Any]
    ) -> dict[str, Any]:
        own = next((key for key in self._input_keys if key in row), "")
        asked, count = row.get(own, prompt), len(said)
        talks = isinstance(asked, list) and bool(asked) and isinstance(asked[0], dict)
        completions = [[{"role": "assistant", "content": text}] for text in said] if talks else [*said]
        columns = {key: _copies(value, count) for key, value in row.items() if key not in (*OWN, own)}
        return {
            "prompts": _copies(asked, count),
            "completions": completions,
            "completion_ids": [list(one) for one in ids],
            "log_extra": _keeps_nothing,
            "log_metric": _keeps_nothing,
            **columns,
        }

    def _sum(self, values: Sequence[Any]) -> float | None:
        """The weighted sum of what was said; raises ValueError for what is no number."""
        total, none = 0.0, True
        for value, (function, weight) in zip(values, self._functions):
            if value is None:
                continue
            scored = outcome(value)
            if scored.value is None:
                raise ValueError(f"{_name(function)} {scored.why}")
            total, none = total + weight * scored.value, False
        return None if none else total

    async def _on_threads(self, calls: Sequence[Callable[[], Any]], begins: Callable[[], None]) -> list[Any]:
        """What these calls return, each on a thread; all of them have one turn."""
        if not calls:
            begins()
            return []
        async with self._turns:
            begins()
            return await together(self._on_thread(call) for call in calls)

    async def _on_thread(self, call: Callable[[], Any]) -> Any:
        if self._threads.left_behind >= DEFAULT_WORKERS:
            raise ValueError(f"not called: {DEFAULT_WORKERS} earlier calls never came back")
        return await self._threads.done(call)


def _taken(function: Function, given: dict[str, Any]) -> dict[str, Any]:
    """What a function takes of it."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return given
    return {p.name: given[p.name] for p in parameters if p.name in given}


def _copies(value: Any, count: int) -> list[Any]:
    return [copy.deepcopy(value) for _ in range(count)]


def _listed(function: Function, got: Any, count: int) -> list[Any]:
    """A list with an item for each of `count` responses; raises ValueError."""
    if hasattr(got, "tolist"):
        got = got.tolist()  # an array or tensor
    if not isinstance(got, list | tuple) or len(got) != count:
        size = f" of {len(got)}" if isinstance(got, list | tuple) else ""
        raise ValueError(
            f"{_name(function)} returned {type(got).__name__}{size}, not a list of {count} numbers"
        )
    return list(got)


def _name(function: Function) -> str:
    return getattr(function, "__name__", type(function).__name__)
