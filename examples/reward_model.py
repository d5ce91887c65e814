"""A reward by a reward model: how likely a frozen model of the run finds the response."""

import asyncio
from typing import Any

import aiohttp

from turnout.core.errors import EngineDead
from turnout.serving.models import Models, model_url

PAUSE_S = 0.5


async def mean_logprob(prompt: str, response: str, label: Any, run: Models, **metadata: Any) -> float:
    """The mean log-probability of the response's tokens, given the prompt, by the model `reward`."""
    return await score(run, "reward", prompt, response)


async def score(run: Models, model: str, prompt: str, response: str) -> float:
    """As `mean_logprob`, by a model of any name. Raises RuntimeError where it gave no log-probs: the sample is
    unscored then, which is not a zero."""
    begin = len(await logprobs(run, model, prompt))
    values = [row[0] for row in (await logprobs(run, model, prompt + response))[begin:]]
    if not values or None in values:
        raise RuntimeError(f"the model {model!r} gave no log-probs of the response {response!r}")
    return sum(values) / len(values)


async def logprobs(run: Models, model: str, text: str) -> list[Any]:
    """SGLang's `input_token_logprobs` of a text: of each token [log-prob given what precedes it, id, None]."""
    body = {
        "text": text,
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    reply = await post(run, model, "/generate", body)
    return reply["meta_info"]["input_token_logprobs"]


async def post(run: Models, model: str, path: str, body: dict[str, Any]) -> Any:
    """The answer of a model of the run. While none of its engines is up it is asked again, until the deadline of
    the reward (--reward-timeout-s). Raises RuntimeError with what was said where it is not a 200."""
    async with aiohttp.ClientSession(trust_env=False) as session:
        while True:
            try:
                async with session.post(model_url(run, model, path), json=body) as answer:
                    if answer.status != 200:
                        raise RuntimeError(f"{model} answered {answer.status}: {await answer.text()}")
                    return await answer.json()
            except (aiohttp.ClientConnectionError, EngineDead):
                await asyncio.sleep(PAUSE_S)
