"""Options of samples that an agent makes."""

from __future__ import annotations

from typing import ClassVar, Literal

from turnout.config.option import PATH, Options, option


class AgentOptions(Options):
    title: ClassVar[str] = "Agents"

    custom_agent_path: str | None = option(
        None,
        "Agent that makes a sample: `package.module:function` or `path/to/file.py:function`, called as "
        "agent(endpoint, row) -> reward or None, async or not. It talks to the model at endpoint.base_url with any "
        "client of OpenAI's chat completions (docs/guides/agents.md).",
        unset="no agent",
        pattern=PATH,
    )
    agent_tool_parser: Literal["hermes", "llama3"] = option(
        "hermes",
        "How the model writes tool calls. hermes: <tool_call>{...}</tool_call> (Qwen, SmolLM3). llama3: the whole "
        "answer is one JSON object.",
    )
