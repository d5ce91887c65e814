"""Samples by agents that use OpenAI's client, on a scripted engine: exact tokens, tools, streams, limits, faults,
cuts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from openai import (
    APITimeoutError,
    AsyncOpenAI,
    BadRequestError,
    InternalServerError,
    NotFoundError,
    OpenAI,
    omit,
)

from tests.scripted_engine import HANG, RESET, ScriptedEngine
from tests.unit.rollout.test_sampler import SEED, V1, V2
from turnout.core.errors import ConfigError, EngineError, GenerateFailed
from turnout.core.types import ENVIRONMENT, Finish, Prompt, Trajectory
from turnout.placement.real import RealClock
from turnout.protocol.openai_chat import parse_chat
from turnout.protocol.sglang import GenerateReply, SamplingParams
from turnout.rollout import episode
from turnout.rollout.agent import AgentEndpoint, AgentRuns, load_agent
from turnout.rollout.cut import Cut
from turnout.rollout.episode import Turns
from turnout.rollout.prompts import DataSpec
from turnout.rollout.sampler import Ask, Routes, Sampler, SamplingPlan
from turnout.rollout.tokenizer import HubTokenizer
from turnout.rollout.tool_calls import PARSERS
from turnout.serving import agent_endpoint
from turnout.train.model_tokenizer import BOS_ID, EOS_ID, PAD_ID, byte_tokenizer

TOKENIZER = HubTokenizer(Path("tiny"), byte_tokenizer(), (EOS_ID,))
PROMPT = Prompt("7", (BOS_ID,), "", None, {"row": {"question": "2 + 2?", "label": "4"}})
ADD: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'
ASKED: list[Any] = [{"role": "user", "content": "2 + 2?"}]


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, special=False)


class World:
    """An engine that says one text after the other; each with the end token unless it is a list of ids."""

    def __init__(self, engine: ScriptedEngine, *says: str | list[int], label: str = V1) -> None:
        self.engine, self.says, self.label = engine, list(says), label
        engine.on_generate = self.made
        client = engine.client()
        self.sampler = Sampler(Routes(lambda: [client]), TOKENIZER, RealClock())

    def made(self, body: Any) -> Any:
        text = self.says.pop(0)
        ids = [*ids_of(text), EOS_ID] if isinstance(text, str) else text
        most = body["sampling_params"]["max_new_tokens"]
        finish = Finish.STOP if len(ids) <= most and ids[-1] == EOS_ID else Finish.LENGTH
        ids = tuple(ids[:most])
        values = tuple(-(at % 97) / 100 for at in range(len(ids)))
        return GenerateReply("", ids, values, finish, "", ((len(ids), self.label),), 4, 0).to_json("rid")

    async def sample(self, agent: Any, begun: Trajectory | None = None, **more: Any) -> Trajectory:
        plan = SamplingPlan(
            1, SamplingParams(max_new_tokens=more.pop("new", 400)), more.pop("deadline", 60.0), 1,
            more.pop("context", 4000),
        )  # fmt: skip
        runs = AgentRuns(agent, TOKENIZER, DataSpec(""), "hermes")
        turns = Turns(self.sampler, runs.generate, TOKENIZER, more.pop("most", 5))
        prompt = more.pop("prompt", PROMPT)
        return await turns.sample(Ask(prompt, plan, begun or Trajectory.unbegun(SEED), 0, **more))

    def sent(self) -> list[list[int]]:
        return [body["input_ids"] for body in self.engine.sent("/generate")]


def on(use: Callable[[World], Awaitable[None]], *says: str | list[int]) -> None:
    async def main() -> None:
        async with ScriptedEngine() as engine:
            await asyncio.wait_for(use(World(engine, *says)), 120)

    asyncio.run(main())


def client_of(endpoint: AgentEndpoint, **more: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, timeout=60, **more)


async def ask(endpoint: AgentEndpoint, talk: list[Any], **more: Any) -> Any:
    async with client_of(endpoint) as client:
        return await client.chat.completions.create(model=endpoint.model, messages=talk, **more)


async def with_tool(endpoint: AgentEndpoint, row: dict[str, Any]) -> float:
    """One turn that calls a tool, and one that answers."""
    talk: list[Any] = [{"role": "user", "content": row["question"]}]
    answer = await ask(endpoint, talk, tools=[ADD], temperature=0.2)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"a": 2, "b": 2}
    talk += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "4"}]
    answer = await ask(endpoint, talk, tools=[ADD])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("it is 4", "stop")
    assert answer.usage.completion_tokens == len("it is 4") + 1
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == answer.usage.total_tokens
    return 0.5


OPENING = ids_of(f"tools: {json.dumps([ADD])}\nuser: 2 + 2?\nassistant: ")


def test_an_agent_with_a_tool_makes_one_exact_sequence() -> None:
    """A token that text does not show (PAD) stays: what the model wrote is never tokenised again."""
    first = [*ids_of(CALL), PAD_ID, EOS_ID]
    between = ids_of("\ntool: 4\nassistant: ")
    second = [*ids_of("it is 4"), EOS_ID]

    async def use(world: World) -> None:
        made = await world.sample(with_tool)
        opening = len(made.response_ids) - len(first) - len(between) - len(second)
        assert made.opening == opening and TOKENIZER.decode(made.response_ids[:opening]).endswith(
            "assistant: "
        )
        assert list(made.response_ids[opening:]) == [*first, *between, *second]
        counts = (opening, len(first), len(between), len(second))
        assert made.loss_mask == sum(((mask,) * n for mask, n in zip((0, 1, 0, 1), counts)), ())
        assert [name for _, name in made.engines.runs] == [ENVIRONMENT, "e0", ENVIRONMENT, "e0"]
        assert made.spans.runs == ((sum(counts), V1),) and (made.finish, made.reward) == (Finish.STOP, 0.5)
        assert made.logprobs[opening + 1] == -0.01 and set(made.logprobs[:opening]) == {0.0}
        assert world.sent()[0] == [BOS_ID, *made.response_ids[:opening]]
        assert world.sent()[1] == [BOS_ID, *made.response_ids[: -len(second)]]
        assert made.text == f"{CALL}\ntool: 4\nassistant: it is 4", "without what came before the first turn"
        temperatures = {body["sampling_params"]["temperature"] for body in world.engine.sent("/generate")}
        assert temperatures == {1.0}, "the run's, whatever the agent asks for"

    on(use, first, second)


def test_weights_that_change_between_turns_are_of_their_own_tokens() -> None:
    async def use(world: World) -> None:
        async def two(endpoint: AgentEndpoint, _row: Any) -> None:
            answer = await ask(endpoint, ASKED)
            world.label = V2
            await ask(endpoint, [*ASKED, answer.choices[0].message, {"role": "user", "content": "sure?"}])

        made = await world.sample(two)
        old = made.opening + 3 + len("\nuser: sure?\nassistant: ")
        assert made.spans.runs == ((old, V1), (4, V2)) and made.reward is None

    on(use, "ab", "abc")


def test_a_stream_and_a_client_that_is_not_async() -> None:
    async def use(world: World) -> None:
        def streams(endpoint: AgentEndpoint, _row: Any) -> float:
            client = OpenAI(base_url=endpoint.base_url, api_key="x", timeout=60)
            said, usage, ends = "", None, list[Any]()
            more: Any = {"stream": True, "stream_options": {"include_usage": True}}
            for chunk in client.chat.completions.create(model="m", messages=ASKED, **more):
                said += "".join(choice.delta.content or "" for choice in chunk.choices)
                ends += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
                usage = chunk.usage or usage
            assert (said, ends) == ("four", ["stop"]) and usage is not None and usage.completion_tokens == 5
            assert [model.id for model in client.models.list()] == ["turnout"]
            return 1

        assert (await world.sample(streams)).reward == 1.0

    on(use, "four")


@pytest.mark.parametrize(
    "talk, said",
    [
        (
            [{"role": "user", "content": "3 + 3?"}, {"role": "assistant", "content": "four"}],
            "message 0 .user.",
        ),
        ([*ASKED, {"role": "assistant", "content": "five"}, *ASKED], "message 1 .assistant.*'five'"),
        (ASKED, "it has 1 messages, and 2 were said"),
        ([*ASKED, {"role": "assistant", "content": " four\n"}], "nothing was said since"),
        ([*ASKED, {"role": "assistant", "content": "four"}, *ASKED, ADD], "its tools are others"),
    ],
)
def test_a_conversation_that_is_another_one_fails_the_sample_whatever_the_agent_says(
    talk: Any, said: str
) -> None:
    async def use(world: World) -> None:
        async def rewrites(endpoint: AgentEndpoint, _row: Any) -> float:
            await ask(endpoint, ASKED)
            tools = [talk.pop()] if talk[-1] is ADD else omit
            with pytest.raises(BadRequestError) as caught:
                await ask(endpoint, talk, tools=tools)
            assert caught.value.code == "history_differs"
            return 1.0

        with pytest.raises(GenerateFailed, match=said):
            await world.sample(rewrites)
        assert len(world.sent()) == 1

    on(use, "four")


def test_tokens_or_turns_that_are_used_up_end_the_sample_by_length() -> None:
    async def use(world: World) -> None:
        async def endless(endpoint: AgentEndpoint, _row: Any) -> float:
            talk: list[Any] = [*ASKED]
            while True:
                answer = await ask(endpoint, talk, max_tokens=4)
                talk += [answer.choices[0].message, *ASKED]

        made = await world.sample(endless, new=30)
        assert made.finish is Finish.LENGTH and made.reward is None
        assert len(made.response_ids) - made.opening == 30, "the opening is not the response's"
        made = await world.sample(endless, most=2)
        assert made.finish is Finish.LENGTH and sum(made.loss_mask) == 8
        assert (await world.sample(endless, context=5)).response_ids == (), "no room for a token"

    on(use, *["so long"] * 9)


async def raises(endpoint: AgentEndpoint, _row: Any) -> None:
    await ask(endpoint, ASKED)
    raise KeyError("tool")


async def cancels(endpoint: AgentEndpoint, _row: Any) -> None:
    await ask(endpoint, ASKED)
    raise asyncio.CancelledError


async def hangs(endpoint: AgentEndpoint, _row: Any) -> None:
    await ask(endpoint, ASKED)
    await asyncio.Event().wait()


async def leaves(_endpoint: AgentEndpoint, _row: Any) -> float:
    return 1.0


async def is_text(endpoint: AgentEndpoint, _row: Any) -> Any:
    await ask(endpoint, ASKED)
    return "0.5"


@pytest.mark.parametrize(
    "agent, said",
    [(raises, "KeyError: 'tool'"), (cancels, "raised CancelledError"), (hangs, "not ended after 3 s"),
     (leaves, "made no turn"), (is_text, "returned the text '0.5'")],
)  # fmt: skip
def test_an_agent_that_fails_fails_its_sample(agent: Any, said: str) -> None:
    async def use(world: World) -> None:
        with pytest.raises(GenerateFailed, match=said):
            await world.sample(agent, deadline=3.0 if agent is hangs else 60.0)

    on(use, "four")


def test_an_agent_that_hangs_on_its_thread_is_left_behind() -> None:
    async def use(world: World) -> None:
        world.engine.script("/generate", HANG)

        def waits(endpoint: AgentEndpoint, _row: Any) -> None:
            client = OpenAI(base_url=endpoint.base_url, api_key="x", max_retries=0)
            client.chat.completions.create(model="m", messages=ASKED)

        with pytest.raises(GenerateFailed, match="not ended after"):
            await world.sample(waits, deadline=0.5)

    on(use)


def test_the_end_of_an_engine_is_the_samples_fault_not_the_agents() -> None:
    async def use(world: World) -> None:
        async def tells_nobody(endpoint: AgentEndpoint, _row: Any) -> float:
            with pytest.raises(InternalServerError):
                await ask(endpoint, ASKED)
            return 1.0

        world.engine.script("/generate", *[RESET] * 3)
        with pytest.raises(EngineError):
            await world.sample(tells_nobody)
        assert len(world.sent()) == 3, "the client does not ask again by itself"

    on(use)


def test_a_sample_that_was_cut_in_a_tool_goes_on_with_what_exists() -> None:
    async def use(world: World) -> None:
        reached, cut, calls = asyncio.Event(), Cut(), list[int]()

        async def tool(endpoint: AgentEndpoint, _row: Any) -> float:
            answer = await ask(endpoint, ASKED)
            assert answer.choices[0].message.content == "four"
            calls.append(1)
            if len(calls) == 1:
                reached.set()
                await asyncio.Event().wait()
            await ask(endpoint, [*ASKED, answer.choices[0].message, {"role": "user", "content": "sure?"}])
            return 1.0

        task = asyncio.ensure_future(world.sample(tool, cut=cut))
        await reached.wait()
        cut()
        partial = await task
        assert partial.partial and partial.reward is None and sum(partial.loss_mask) == 5
        made = await world.sample(tool, partial)
        assert made.response_ids[: len(partial.response_ids)] == partial.response_ids
        assert (made.reward, sum(made.loss_mask), len(world.sent())) == (1.0, 5 + 4, 2)

    on(use, "four", "yes")


def test_what_is_not_served_is_refused_by_name_and_can_be_gone_on_from() -> None:
    async def use(world: World) -> None:
        async def tries(endpoint: AgentEndpoint, _row: Any) -> float:
            for more, said in (
                ({"n": 2}, "n 2 is not served"), ({"logprobs": True}, "logprobs is not served"),
                ({"tool_choice": "required", "tools": [ADD]}, "tool_choice 'required'"),
                ({"response_format": {"type": "json_object"}}, "response_format"),
                ({"max_tokens": 0}, "max_tokens 0"),
                ({"reasoning_effort": "low"}, "reasoning_effort is not known"),
                ({"parallel_tool_calls": False, "tools": [ADD]}, "parallel_tool_calls False"),
                ({"extra_body": {"chat_template_kwargs": {}}}, "chat_template_kwargs is not known"),
            ):  # fmt: skip
                with pytest.raises(BadRequestError, match=said):
                    await ask(endpoint, ASKED, **more)
            picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            with pytest.raises(BadRequestError, match="only text parts"):
                await ask(endpoint, [picture])
            async with client_of(endpoint) as client:
                with pytest.raises(NotFoundError, match="only chat completions"):
                    await client.responses.create(model="m", input="x")
            await ask(endpoint, ASKED)
            return 1.0

        assert (await world.sample(tries)).reward == 1.0

    on(use, "four")


def test_a_client_that_lost_an_answer_gets_it_again() -> None:
    async def use(world: World) -> None:
        async def again(endpoint: AgentEndpoint, _row: Any) -> float:
            header = {"x-stainless-retry-count": "1"}
            answers = [await ask(endpoint, ASKED, extra_headers=more) for more in (None, header)]
            assert answers[0].id == answers[1].id
            return 1.0

        assert (await world.sample(again)).reward == 1.0
        assert len(world.sent()) == 1

    on(use, "four")


def test_nobody_else_finds_the_endpoint_and_it_ends_with_its_sample() -> None:
    async def use(world: World) -> None:
        seen: list[str] = []

        async def agent(endpoint: AgentEndpoint, _row: Any) -> float:
            seen.append(endpoint.base_url)
            other = AgentEndpoint(endpoint.base_url[:-3] + "x/v1")
            with pytest.raises(NotFoundError):
                await ask(other, ASKED)
            await ask(endpoint, ASKED)
            return 1.0

        await world.sample(agent)
        with pytest.raises(Exception, match="Connect"):
            await ask(AgentEndpoint(seen[0]), ASKED)

    on(use, "four")


def test_turns_of_one_sample_have_one_routing_key() -> None:
    """By which a router keeps them on one engine: tests/process/test_router_list.py."""

    async def use(world: World) -> None:
        keys: list[str] = []
        client = world.engine.client()
        client._headers = lambda request: keys.append(request.routing_key) or {}  # type: ignore[method-assign]
        world.sampler = Sampler(Routes(lambda: [client]), TOKENIZER, RealClock())
        await world.sample(with_tool)
        assert keys == [f"{SEED:016x}"] * 2

    on(use, CALL, "it is 4")


def test_an_agent_that_cannot_be_called_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def agent(client): ...\n")
    with pytest.raises(ConfigError, match="two arguments"):
        load_agent(f"{path}:agent")


def test_an_agent_that_goes_on_without_its_answer_fails_its_sample() -> None:
    """Its client timed out: what the model said trained, and the agent never saw it."""

    async def use(world: World) -> None:
        release = asyncio.Event()

        async def late(body: Any) -> Any:
            await release.wait()
            return world.made(body)

        async def gives_up(endpoint: AgentEndpoint, _row: Any) -> float:
            client = client_of(endpoint, max_retries=0)
            with pytest.raises(APITimeoutError):
                await client.chat.completions.create(model="m", messages=ASKED, timeout=0.2)
            return 1.0

        async def comes_back_late(endpoint: AgentEndpoint, row: Any) -> float:
            await gives_up(endpoint, row)
            release.set()
            await world.engine.until_running(0)
            await asyncio.sleep(0.1)
            return 1.0

        world.engine.on_generate = late
        with pytest.raises(GenerateFailed, match="a turn had not ended"):
            await world.sample(gives_up)
        with pytest.raises(GenerateFailed, match="without the answer"):
            await world.sample(comes_back_late)

    on(use, "four")


def test_a_cut_in_a_turn_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode, "ENDS_S", 1000.0)

    async def use(world: World) -> None:
        async def one(endpoint: AgentEndpoint, _row: Any) -> None:
            await ask(endpoint, ASKED)

        world.engine.script("/generate", HANG)
        cut = Cut()
        task = asyncio.ensure_future(world.sample(one, cut=cut, deadline=2000.0))
        await world.engine.until_running(1)
        cut()
        assert (await task).partial

    on(use)


def test_marks_of_media_in_what_was_said_are_text() -> None:
    async def use(world: World) -> None:
        async def two(endpoint: AgentEndpoint, _row: Any) -> float:
            answer = await ask(endpoint, [{"role": "user", "content": "a <audio>?"}])
            talk = [{"role": "user", "content": "a <audio>?"}, answer.choices[0].message]
            await ask(endpoint, [*talk, {"role": "user", "content": "<video>"}])
            return 1.0

        made = await world.sample(two)
        assert made.text == "an <image>\nuser: <video>\nassistant: yes"

    on(use, "an <image>", "yes")


def test_a_turn_that_cannot_be_told_fails_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_text: str) -> Any:
        raise KeyError

    monkeypatch.setitem(PARSERS, "hermes", broken)

    async def use(world: World) -> None:
        async def goes_on(endpoint: AgentEndpoint, _row: Any) -> float:
            client = client_of(endpoint, max_retries=0)
            with pytest.raises(InternalServerError):
                await client.chat.completions.create(model="m", messages=ASKED, tools=[ADD])
            return 1.0

        with pytest.raises(GenerateFailed, match="could not be told"):
            await world.sample(goes_on)

    on(use, "four")


def test_an_agent_that_changes_its_row_changes_nobody_elses() -> None:
    async def use(world: World) -> None:
        async def changes(endpoint: AgentEndpoint, row: dict[str, Any]) -> float:
            row["tags"].append("mine")
            await ask(endpoint, ASKED)
            return len(row["tags"])

        prompt = replace(PROMPT, metadata={"row": {"tags": ["a"]}})
        assert [(await world.sample(changes, prompt=prompt)).reward for _ in range(2)] == [2.0, 2.0]

    on(use, "four", "four")


def test_a_limit_that_is_null_is_none() -> None:
    body = {"messages": ASKED, "max_completion_tokens": None, "max_tokens": 24}
    assert parse_chat(body, again=False).most == 24


@pytest.mark.parametrize(
    "body, status",
    [
        (b"{", 400), (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        (b'{"messages": [{"role": "assistant", "content": "", "tool_calls": 5}]}', 400),
        (b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": 5}]}]}', 400),
        (b'{"messages": "' + b"x" * 2000 + b'"}', 413),
    ],
)  # fmt: skip
def test_what_is_no_request_is_told_in_openais_shape(
    body: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_endpoint, "BODY_BYTES_MAX", 1000)

    async def use(world: World) -> None:
        async def sends(endpoint: AgentEndpoint, _row: Any) -> float:
            url, headers = f"{endpoint.base_url}/chat/completions", {"Content-Type": "application/json"}
            async with ClientSession() as session, session.post(url, data=body, headers=headers) as answer:
                assert answer.status == status and answer.headers["x-should-retry"] == "false"
                assert (await answer.json())["error"]["message"]
            await ask(endpoint, ASKED)
            return 1.0

        assert (await world.sample(sends)).reward == 1.0

    on(use, "four")
