"""The bodies of POST /v1/completions and /v1/chat/completions, turned into a call of /generate, as SGLang does.

Promises: what this engine does not serve (log-probs of other tokens than the chosen, tools, structured output,
images, echo) is refused by name, never ignored, since it would change the answer; `n` samples and lists of prompts
are so many requests, sample i of a seeded call with seed + i.
"""

from __future__ import annotations

import inspect
import secrets
from dataclasses import dataclass
from typing import Any

from turnout.core.errors import Fault
from turnout.engine.generate_request import PROMPTS_MAX, GenerateCall, parse_generate
from turnout.engine.model import LoadedModel
from turnout.engine.requests import BadRequest

COMPLETION_TOKENS = (
    16  # OpenAI's default of max_tokens for completions; a chat goes to the end of the context
)
REFUSED = (
    "echo", "suffix", "tools", "functions", "function_call", "audio", "lora_path", "return_hidden_states",
)  # fmt: skip
NEUTRAL = {
    "best_of": (1,), "tool_choice": ("none", "auto"), "response_format": ({"type": "text"},),
    "modalities": (["text"],), "top_logprobs": (0,),
}  # fmt: skip
AS_THEY_ARE = (
    "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "json_schema", "regex", "ebnf",
    "stop_regex", "no_stop_trim",
)  # fmt: skip


@dataclass(frozen=True)
class OpenAICall:
    """`asked` has the requests of prompt 0 first, `samples` of each. `id` is the completion's."""

    asked: GenerateCall
    id: str
    chat: bool
    samples: int
    model: str
    include_usage: bool


def parse_completion(row: dict[str, Any], model: LoadedModel, served: str) -> OpenAICall:
    """`prompt` is a text, token ids, or a list of either."""
    faults = _faults(row)
    logprobs = row.get("logprobs")
    if logprobs is not None and (isinstance(logprobs, bool) or logprobs != 0):
        reason = "only the log-prob of the chosen token is served"
        faults.append(Fault("logprobs", str(logprobs)[:40], reason, "use 0"))
    prompt = row.get("prompt")
    prompts: list[Any] = [prompt]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompts = prompt
    if not isinstance(prompt, str | list) or not prompt:
        faults.append(Fault("prompt", "", "must be a text, token ids, or a list of either, and not empty"))
    if faults:
        raise BadRequest(faults)
    new = row["max_tokens"] if row.get("max_tokens") is not None else COMPLETION_TOKENS
    return _call(row, prompts, _sampling(row, new), (model, served, logprobs is not None, False))


def parse_chat(row: dict[str, Any], model: LoadedModel, served: str) -> OpenAICall:
    """`messages` go through the tokenizer's chat template."""
    faults = _faults(row)
    logprobs = row.get("logprobs")
    if logprobs is not None and not isinstance(logprobs, bool):
        faults.append(Fault("logprobs", str(logprobs)[:40], "must be true or false"))
    ids = _chat_ids(row, model, faults)
    if faults:
        raise BadRequest(faults)
    new = row.get("max_completion_tokens")
    new = row.get("max_tokens") if new is None else new
    if new is None:
        new = max(1, model.shape.context_length - len(ids))
    return _call(row, [ids], _sampling(row, new), (model, served, bool(logprobs), True))


def _faults(row: dict[str, Any]) -> list[Fault]:
    faults = [Fault(name, "", "is not served by this engine") for name in REFUSED if row.get(name)]
    for name, values in NEUTRAL.items():
        value = row.get(name)
        if value is not None and value not in values:
            faults.append(Fault(name, str(value)[:40], "is not served by this engine"))
    for name in ("max_tokens", "max_completion_tokens", "n"):
        value = row.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            faults.append(Fault(name, str(value)[:40], "must be a whole number of at least 1"))
    options = row.get("stream_options")
    if options is not None and not isinstance(options, dict):
        faults.append(Fault("stream_options", str(options)[:40], "must be an object"))
    seed = row.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        faults.append(Fault("seed", str(seed)[:40], "must be a whole number"))
    if row.get("model") is not None and not isinstance(row["model"], str):
        faults.append(Fault("model", str(row["model"])[:40], "must be a text"))
    return faults


def _sampling(row: dict[str, Any], max_new_tokens: int) -> dict[str, Any]:
    named = {name: row[name] for name in AS_THEY_ARE if row.get(name) is not None}
    least = row.get("min_tokens")
    return named | {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": least,
        "sampling_seed": row.get("seed"),
    }


def _call(
    row: dict[str, Any],
    prompts: list[Any],
    sampling: dict[str, Any],
    context: tuple[LoadedModel, str, bool, bool],
) -> OpenAICall:
    """`context`: model, its name, whether log-probs are wanted, whether it is a chat."""
    model, served, logprobs, chat = context
    samples = row["n"] if row.get("n") is not None else 1
    if samples * len(prompts) > PROMPTS_MAX:
        raise BadRequest(Fault("n", str(samples), f"at most {PROMPTS_MAX} answers in one call"))
    name = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(16)}"
    native: dict[str, Any] = {
        "rid": row["rid"] if row.get("rid") is not None else name,
        "extra_key": row.get("extra_key"),
        "stream": row.get("stream"),
        "return_logprob": logprobs,
    }
    key = "text" if isinstance(prompts[0], str) else "input_ids"
    if samples * len(prompts) == 1:
        native |= {key: prompts[0], "sampling_params": sampling}
    else:
        seed = sampling["sampling_seed"]
        seeds = [None if seed is None else seed + at for at in range(samples)]
        native[key] = [prompt for prompt in prompts for _ in range(samples)]
        native["sampling_params"] = [sampling | {"sampling_seed": s} for _ in prompts for s in seeds]
    options = row["stream_options"] if row.get("stream_options") is not None else {}
    return OpenAICall(
        asked=parse_generate(native, model),
        id=name,
        chat=chat,
        samples=samples,
        model=row["model"] if row.get("model") is not None else served,
        include_usage=options.get("include_usage") is True,
    )


def _chat_ids(row: dict[str, Any], model: LoadedModel, faults: list[Fault]) -> list[int]:
    tokenizer = model.tokenizer
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        reason = "the model has no tokenizer" if tokenizer is None else "the model has no chat template"
        faults.append(Fault("messages", "", reason, "use /v1/completions or /generate"))
        return []
    extra = row["chat_template_kwargs"] if row.get("chat_template_kwargs") is not None else {}
    own = set(inspect.signature(tokenizer.apply_chat_template).parameters)
    if not isinstance(extra, dict) or own & set(extra):
        faults.append(
            Fault("chat_template_kwargs", str(extra)[:40], "must be an object of template variables")
        )
        return []
    messages = _messages(row.get("messages"), faults)
    if not messages:
        return []
    from jinja2 import TemplateError  # noqa: PLC0415 - comes with the tokenizer, see engine.model

    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, **extra
        )
    except (TemplateError, TypeError, ValueError, KeyError) as fault:
        faults.append(Fault("messages", "", f"the chat template refuses them: {fault}"))
        return []


def _messages(messages: Any, faults: list[Fault]) -> list[dict[str, Any]]:
    """Role and text of each message; a list of text parts is joined."""
    if not isinstance(messages, list) or not messages:
        faults.append(Fault("messages", "", "must be a list of at least one message"))
        return []
    plain = []
    for at, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            texts: list[Any] = [part.get("text") if isinstance(part, dict) else None for part in content]
            content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
        if content is None or not isinstance(content, str) or not isinstance(message.get("role"), str):
            faults.append(Fault(f"messages[{at}]", "", "must have a role and a text as content"))
        elif message.get("tool_calls"):
            faults.append(Fault(f"messages[{at}].tool_calls", "", "is not served by this engine"))
        else:
            plain.append({"role": message["role"], "content": content})
    return [] if faults else plain
