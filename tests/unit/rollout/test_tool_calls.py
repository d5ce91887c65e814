"""Tool calls in what a model wrote."""

from __future__ import annotations

import pytest

from turnout.rollout.tool_calls import hermes, llama3

ADD = '{"name": "add", "arguments": {"a": 2}}'


@pytest.mark.parametrize(
    "text, rest, names",
    [
        (f"so\n<tool_call>\n{ADD}\n</tool_call>\n", "so", ["add"]),
        (f"<tool_call>{ADD}</tool_call> and <tool_call>{ADD}</tool_call>", "and", ["add", "add"]),
        (f"<tool_call>5</tool_call> <tool_call>{ADD}</tool_call>", "<tool_call>5</tool_call>", ["add"]),
        (f" <tool_call>{ADD}", f" <tool_call>{ADD}", []),
        (f" </tool_call>{ADD}<tool_call> ", f" </tool_call>{ADD}<tool_call> ", []),
    ],
)
def test_hermes_takes_calls_out_and_leaves_the_rest(text: str, rest: str, names: list[str]) -> None:
    found, calls = hermes(text)
    assert (found, [name for name, _ in calls]) == (rest, names)


@pytest.mark.parametrize("text", ["<tool_call>" + "\n" * 1_000_000, "<tool_call>\n" * 100_000])
def test_hermes_is_done_at_once_with_calls_that_do_not_close(text: str) -> None:
    """A regular expression took minutes for 8000 line feeds."""
    assert hermes(text) == (text, []) and llama3(text) == (text, [])


def test_llama3_takes_a_whole_answer() -> None:
    assert llama3(f" <|python_tag|>{ADD}\n") == ("", [("add", '{"a": 2}')])
    assert llama3(f"so {ADD}") == (f"so {ADD}", [])
