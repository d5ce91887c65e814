"""An agent for examples/agent.yaml: it asks the model as any program asks OpenAI, with a tool that it may call.

pip install openai
turnout train examples/agent.yaml
"""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI, BadRequestError

from turnout.rollout.agent import AgentEndpoint

TURNS, TURN_TOKENS = 3, 24
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


async def agent(endpoint: AgentEndpoint, row: dict[str, Any]) -> float:
    """Asks for the row's sum until the model says it; the reward is the share of digits in what it said."""
    messages: list[Any] = list(row["prompt"])
    said = ""
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        for _ in range(TURNS):
            try:
                answer = await client.chat.completions.create(
                    model=endpoint.model, messages=messages, tools=[ADD], max_tokens=TURN_TOKENS
                )
            except BadRequestError as fault:
                if fault.code != "context_length_exceeded":
                    raise
                break  # no tokens are left
            message = answer.choices[0].message
            said += message.content or ""
            messages.append(message)
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": called(call.function)}
                for call in message.tool_calls or []
            ]
            if not message.tool_calls:
                if str(row["label"]) in said:
                    break
                messages.append({"role": "user", "content": "No. Give me a number."})
    return sum(char.isdigit() for char in said) / max(1, len(said))


def called(function: Any) -> str:
    """What the tool says: a number, or why there is none."""
    try:
        arguments = json.loads(function.arguments)
        return str(int(arguments["a"]) + int(arguments["b"]))
    except (KeyError, TypeError, ValueError) as fault:
        return f"error: {fault!r}"
