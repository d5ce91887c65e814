"""A sample made by an agent that talks to the model as to OpenAI (--custom-agent-path; docs/guides/agents.md).

    async def agent(endpoint, row):
        client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        ...
        return reward      # or None: that of the run

Each sample gets an endpoint of its own, which turns what it is asked into turns of an Episode: all that holds for
turns (exact tokens, weights that change, deaths, cuts, limits, deadlines) holds here. Promises: the model's tokens
are never tokenised again; a request whose conversation is not the recorded one fails the sample, also where the
agent goes on; an agent that raises, hangs or makes no turn fails it too, one that leaves after the tokens or turns
were used up ends it by length. A function that is not async runs on a thread of its own.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from turnout.core.errors import ConfigError, Fault, GenerateFailed
from turnout.core.imports import load_function
from turnout.core.types import Finish
from turnout.placement.call_threads import CallThreads
from turnout.protocol.openai_chat import ChatAnswer, ChatRefused, ChatRequest, ToolCall
from turnout.rollout.chat import Conversation, HistoryDiffers
from turnout.rollout.conversation import PromptFault
from turnout.rollout.episode import Episode, EpisodeOver, Generate, Turn
from turnout.rollout.prompts import ROW, DataSpec
from turnout.rollout.tokenizer import TokenizerLike
from turnout.rollout.tool_calls import PARSERS
from turnout.serving.agent_endpoint import agent_endpoint

FLAG = "--custom-agent-path"
MODEL = "turnout"
LEFT_BEHIND_MAX = 64
UNSEEN = (
    "the agent went on without the answer to its last request: give its client a timeout longer than a turn (the "
    " sample's deadline is --rollout-request-timeout-s)"
)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentEndpoint:
    """What an agent is given to reach the model with."""

    base_url: str
    api_key: str = "none"  # the secret is in the URL
    model: str = MODEL


Agent = Callable[[AgentEndpoint, dict[str, Any]], Any]


def load_agent(path: str) -> Agent:
    """The agent that an option names; raises ConfigError. Requests to loopback go through no proxy of the
    environment from here on, and httpx logs none."""
    agent = load_function(FLAG, path)
    try:
        inspect.signature(agent).bind(None, {})
    except TypeError:
        remedy = "define it (endpoint, row)"
        raise ConfigError(Fault(FLAG, path, "cannot be called with two arguments", remedy)) from None
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs whole URLs, with the secret in them
    for name in ("NO_PROXY", "no_proxy"):
        known = os.environ.get(name, "")
        if "127.0.0.1" not in known.split(","):
            os.environ[name] = ",".join(filter(None, (known, "127.0.0.1")))
    return agent


class AgentRuns:
    """Makes an agent a function of turnout.rollout.episode. `spec`: what else the chat template is given; `parser`:
    the form of tool calls (turnout.rollout.tool_calls)."""

    def __init__(self, agent: Agent, tokenizer: TokenizerLike, spec: DataSpec, parser: str) -> None:
        self.agent, self.tokenizer, self.spec, self.parser = agent, tokenizer, spec, PARSERS[parser]
        self._threads = CallThreads("agent")
        self._said: set[str] = set()

    @property
    def generate(self) -> Generate:
        return self._generate

    async def _generate(self, episode: Episode) -> float | None:
        session = _Session(self, episode)
        async with agent_endpoint(session.answer, MODEL) as base_url:
            call = self._called(AgentEndpoint(base_url), copy.deepcopy(episode.prompt.metadata.get(ROW, {})))
            try:
                await asyncio.wait({call})
            finally:
                self._abandon(call)
            episode.check_turn()  # before the endpoint ends, and its turns with it
        if session.fault is not None:
            raise session.fault
        if session.unseen:
            raise GenerateFailed(UNSEEN)
        if call.cancelled():
            raise GenerateFailed("the agent raised CancelledError")
        fault = call.exception()
        if fault is None:
            return call.result()
        if episode.over is Finish.LENGTH:
            self.say("an agent raised where its sample had no tokens or turns left: %r", fault)
            return None
        raise fault

    def _abandon(self, call: asyncio.Future[Any]) -> None:
        if isinstance(call, asyncio.Task):
            call.cancel()
        else:
            self._threads.abandon(call)

    def _called(self, endpoint: AgentEndpoint, row: dict[str, Any]) -> asyncio.Future[Any]:
        if inspect.iscoroutinefunction(self.agent):
            return asyncio.ensure_future(self.agent(endpoint, row))
        if self._threads.left_behind >= LEFT_BEHIND_MAX:
            raise GenerateFailed(f"the agent was not called: {LEFT_BEHIND_MAX} earlier calls never came back")
        return self._threads.call(partial(self.agent, endpoint, row))

    def say(self, text: str, *values: Any) -> None:
        """Said once in a run."""
        if text not in self._said:
            self._said.add(text)
            log.warning(text, *values)


class _Session:
    """The endpoint's side of one trajectory: one request at a time."""

    def __init__(self, runs: AgentRuns, episode: Episode) -> None:
        self._runs, self._episode = runs, episode
        self._talk = Conversation(runs.tokenizer, runs.spec)
        self._turn = asyncio.Lock()
        self._last: ChatAnswer | None = None
        self._count = 0
        self.fault: GenerateFailed | None = None
        self.unseen = False  # the last answer found no client

    async def answer(self, asked: ChatRequest, gone: Callable[[], bool]) -> ChatAnswer:
        """The model's next turn; `gone` whether its client is. Raises ChatRefused; what fails the sample is in
        `fault` then."""
        async with self._turn:
            if asked.ignored:
                self._runs.say(
                    "agents ask for sampling parameters of their own (such as %s): the run's are used",
                    asked.ignored,
                )
            try:
                answer = await self._answered(asked)
                self.unseen = gone()
                return answer
            except GenerateFailed as fault:
                self.fault = fault
                raise
            except HistoryDiffers as fault:
                reason = f"the agent's conversation is not the recorded one: {fault}"
                self.fault = GenerateFailed(reason)
                raise ChatRefused(reason, "history_differs") from fault
            except PromptFault as fault:
                raise ChatRefused(f"{fault}; {fault.remedy}" if fault.remedy else str(fault)) from fault
            except EpisodeOver as fault:
                used_up = self._episode.over is Finish.LENGTH
                code = "context_length_exceeded" if used_up else "sample_ended"
                raise ChatRefused(f"{fault}: no tokens or turns are left", code) from fault

    async def _answered(self, asked: ChatRequest) -> ChatAnswer:
        if asked.again and self._last is not None and self._talk.same(asked.messages):
            return self._last  # its client lost it
        if self._episode.over is not None:
            raise EpisodeOver(f"the sample has ended by {self._episode.over}")
        told, ids = self._talk.new(asked.messages, asked.tools)
        if not self._talk.begun and asked.tools and not self._talk.shows_tools(told, asked.tools):
            self._runs.say("an agent gives tools, but the chat template does not show them")
        self._take(ids)
        before = self._episode.context
        turn = await self._episode.generate(asked.most, asked.stop)
        self.fault = GenerateFailed("the agent could not be told what the model said")  # unless it is
        answer = self._told(asked, turn, before)
        self._talk.answered(told, asked.tools, answer.message, turn.ids)
        self._last, self.fault = answer, None
        return answer

    def _take(self, ids: list[int]) -> None:
        if self._talk.begun:
            self._episode.append(ids)
        else:
            self._episode.begin(ids)

    def _told(self, asked: ChatRequest, turn: Turn, before: int) -> ChatAnswer:
        text = turn.text
        cuts = [text.find(stop) for stop in asked.stop if stop in text]
        text = text[: min(cuts)] if cuts else text
        content, calls = self._runs.parser(text) if asked.calls else (text, [])
        self._count += 1
        name = f"{self._episode.prompt.prompt_id}-{self._count}"
        return ChatAnswer(
            f"chatcmpl-{name}",
            asked.model or MODEL,
            content,
            tuple(ToolCall(f"call-{name}-{at}", *call) for at, call in enumerate(calls)),
            "tool_calls" if calls else turn.finish.value,
            before,
            len(turn.ids),
        )
