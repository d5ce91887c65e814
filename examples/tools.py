"""A reward that calls a tool served by a frozen model of the run, and has another one judge the outcome."""

from typing import Any

from examples.reward_model import post, score

from turnout.serving.models import Models


async def judged_with_tool(prompt: str, response: str, label: Any, run: Models, **metadata: Any) -> float:
    """How likely the model `reward` finds the tool's answer after prompt and response: a response is good that
    makes the tool say what the judge expects."""
    body = {"model": "tool", "prompt": prompt + response, "max_tokens": 8, "temperature": 0}
    reply = await post(run, "tool", "/v1/completions", body)
    return await score(run, "reward", prompt + response, reply["choices"][0]["text"])
