"""The body of POST /generate as requests of the engine, one or a list, as SGLang 0.5.23 reads it.

Promises: every refusal is a BadRequest with all faults, raised before the compute thread hears of the call; a field
that would change what is generated and is not served is refused, any other unknown one is ignored. Prompt plus
max_new_tokens must fit the context: SGLang refuses that too rather than clamp.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

from turnout.core.errors import Fault
from turnout.core.version import VersionConstraint
from turnout.engine.model import LoadedModel
from turnout.engine.request_machine import Request
from turnout.engine.requests import RID_MAX, BadRequest
from turnout.protocol.sglang import RETURN_TEXT, SamplingParams

PROMPTS_MAX = 1024
STOPS_MAX = 16
EXTRA_KEY_MAX = 1024
FAULTS_SHOWN = 20
GREEDY_BELOW = 1e-6  # a temperature below this is greedy, as in SGLang 0.5.23
PER_PROMPT = (
    "rid",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "extra_key",
)  # a list has one for each prompt
FLAGS = {
    "return_logprob": False, "return_text_in_logprobs": False, "return_routed_experts": False, RETURN_TEXT: True,
}  # fmt: skip
NOT_SERVED = (
    "image_data", "video_data", "audio_data", "input_embeds", "lora_path", "return_hidden_states",
    "custom_logit_processor", "top_logprobs_num", "token_ids_logprob",
    "return_sampling_mask",
)  # fmt: skip
NEUTRAL = {
    "n": (1,), "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,),
    "logit_bias": ({},), "json_schema": (), "regex": (), "ebnf": (), "structural_tag": (), "stop_regex": ([],),
    "no_stop_trim": (False,), "spaces_between_special_tokens": (True,),
}  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """One request of a call and what its reply shall hold."""

    request: Request
    return_logprob: bool
    text_in_logprobs: bool = False
    text: bool = True


@dataclass(frozen=True)
class GenerateCall:
    """`listed`: the answer is a list. `stream`: server-sent events."""

    prompts: tuple[Prompt, ...]
    listed: bool
    stream: bool


def needs_text(row: dict[str, Any]) -> bool:
    """Whether a call has to do with the tokenizer: not where prompt and reply are ids, without stop strings."""
    params = row.get("sampling_params")
    each = params if isinstance(params, list) else [params]
    stops = any(isinstance(one, dict) and one.get("stop") for one in each)
    named = row.get("return_text_in_logprobs") or row.get("text") is not None
    return bool(row.get(RETURN_TEXT) is not False or named or stops)


def parse_generate(row: dict[str, Any], model: LoadedModel) -> GenerateCall:
    """Needs `text` or `input_ids`, or a list of either; a list has one `rid` for all (then <rid>_<i>) or a list."""
    faults: list[Fault] = []
    stream = row.get("stream")
    if stream is not None and not isinstance(stream, bool):
        faults.append(Fault("stream", str(stream)[:40], "must be true or false"))
    parts = _split(row)
    prompts = []
    for at, part in enumerate([row] if parts is None else parts):
        found: list[Fault] = []
        prompt = _one(part, model, found)
        where = "" if parts is None else f"[{at}]."
        faults.extend(Fault(where + f.where, f.value, f.reason, f.remedy) for f in found)
        if prompt is not None:
            prompts.append(prompt)
    rids = [prompt.request.rid for prompt in prompts]
    if len(set(rids)) < len(rids):
        faults.append(Fault("rid", "", "each prompt needs an id of its own"))
    if faults:
        raise BadRequest(faults[:FAULTS_SHOWN])
    return GenerateCall(tuple(prompts), parts is not None, bool(stream))


def _split(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """One body per prompt of a list; None for a single prompt."""
    text, ids = row.get("text"), row.get("input_ids")
    name = "text" if text is not None else "input_ids"
    prompts = row.get(name)
    if not isinstance(prompts, list) or (name == "input_ids" and not (ids and isinstance(ids[0], list))):
        return None
    if not 0 < len(prompts) <= PROMPTS_MAX:
        raise BadRequest(Fault(name, f"{len(prompts)} prompts", f"must be 1 to {PROMPTS_MAX}"))
    if isinstance(row.get("rid"), str):
        row = {**row, "rid": [f"{row['rid']}_{at}" for at in range(len(prompts))]}
    wrong = [n for n in PER_PROMPT if isinstance(row.get(n), list) and len(row[n]) != len(prompts)]
    if wrong:
        raise BadRequest([Fault(n, f"{len(row[n])}", f"there are {len(prompts)} prompts") for n in wrong])
    lists = {n: row[n] for n in PER_PROMPT if isinstance(row.get(n), list)}
    return [
        {**row, name: prompt, **{n: values[at] for n, values in lists.items()}}
        for at, prompt in enumerate(prompts)
    ]


def _one(row: dict[str, Any], model: LoadedModel, faults: list[Fault]) -> Prompt | None:
    faults.extend(Fault(name, "", "is not served by this engine") for name in NOT_SERVED if row.get(name))
    rid = row.get("rid")
    rid = secrets.token_hex(16) if rid is None else rid
    if not isinstance(rid, str) or not 0 < len(rid) <= RID_MAX:
        faults.append(Fault("rid", str(rid)[:40], f"must be a text of 1 to {RID_MAX} characters"))
    flags = {}
    for name, usual in FLAGS.items():
        flags[name] = row[name] if row.get(name) is not None else usual
        if not isinstance(flags[name], bool):
            faults.append(Fault(name, str(flags[name])[:40], "must be true or false"))
    key = row.get("extra_key")
    if key is not None and (not isinstance(key, str) or len(key) > EXTRA_KEY_MAX):
        faults.append(Fault("extra_key", str(key)[:40], f"must be a text up to {EXTRA_KEY_MAX} characters"))
        key = None
    params = _params(row.get("sampling_params"), model, faults)
    ids = _ids(row, model, faults)
    start = _logprob_start(row, len(ids), faults) if flags["return_logprob"] is True else None
    routed = _routed_from(row, len(ids), model, faults) if flags["return_routed_experts"] is True else None
    if params is not None and ids:
        faults.extend(_context_faults(len(ids), params.max_new_tokens, model.shape.context_length))
    if faults or params is None:
        return None
    # As in SGLang 0.5.23, ignore_eos switches off the stop ids of the request as well.
    ends = frozenset(params.stop_token_ids) | model.shape.eos_ids
    end_ids = frozenset() if params.ignore_eos else ends
    seed = params.sampling_seed if params.sampling_seed is not None else secrets.randbits(63)
    constraint = VersionConstraint.parse(key) if key else None
    namespace = key if key and constraint is None else ""
    request = Request(str(rid), ids, params, seed, end_ids, namespace=namespace, constraint=constraint)
    request.logprob_start = start
    request.routed_from = routed
    return Prompt(request, flags["return_logprob"], flags["return_text_in_logprobs"], flags[RETURN_TEXT])


def _logprob_start(row: dict[str, Any], prompt: int, faults: list[Fault]) -> int | None:
    """Where the log-probs of the prompt begin; None where none are asked for (-1 or the prompt's length)."""
    start = row.get("logprob_start_len")
    if start is None or start == -1:
        return None
    if type(start) is not int or not 0 <= start <= prompt:
        reason = f"must be -1 or from 0 to the number of prompt tokens, {prompt}"
        faults.append(Fault("logprob_start_len", str(start)[:40], reason))
        return None
    return start if start < prompt else None


def _routed_from(row: dict[str, Any], prompt: int, model: LoadedModel, faults: list[Fault]) -> int | None:
    """The first position whose experts are asked for: SGLang's `routed_experts_start_len`."""
    start = row.get("routed_experts_start_len")
    start = 0 if start is None else start
    if not getattr(model.config, "num_experts", 0):
        faults.append(Fault("return_routed_experts", "true", "this model has no experts"))
    if row.get("bootstrap_room") is not None:
        faults.append(
            Fault("return_routed_experts", "true", "is not served for a request split over two engines")
        )
    if type(start) is not int or not 0 <= start <= prompt:
        reason = f"must be from 0 to the number of prompt tokens, {prompt}"
        faults.append(Fault("routed_experts_start_len", str(start)[:40], reason))
        return None
    return start


def _context_faults(prompt: int, new: int, context: int) -> list[Fault]:
    if prompt + new <= context:
        return []
    if prompt > context:
        return [Fault("input_ids", f"{prompt} tokens", f"the context is {context} tokens")]
    reason = f"{prompt} prompt tokens and {new} new ones are {prompt + new} in all, the context is {context}"
    return [Fault("max_new_tokens", str(new), reason)]


def _params(row: Any, model: LoadedModel, faults: list[Fault]) -> SamplingParams | None:
    if row is not None and not isinstance(row, dict):
        faults.append(Fault("sampling_params", type(row).__name__, "must be an object"))
        return None
    row = {} if row is None else row
    for name, values in NEUTRAL.items():
        value = row.get(name)
        if value is not None and value not in values:
            faults.append(Fault(name, str(value)[:40], "is not served by this engine"))
    try:
        params = SamplingParams.from_json(row)
    except (ValueError, TypeError) as fault:
        faults.append(Fault("sampling_params", "", str(fault)))
        return None
    if params.min_new_tokens > params.max_new_tokens:
        most = f"must be at most max_new_tokens, {params.max_new_tokens}"
        faults.append(Fault("min_new_tokens", str(params.min_new_tokens), most))
    if any(params.stop) and (len(params.stop) > STOPS_MAX or model.tokenizer is None):
        faults.append(Fault("stop", "", f"at most {STOPS_MAX}, and only where the model has a tokenizer"))
    if not _all_tokens(params.stop_token_ids, model.shape.vocab_size):
        shown = str(list(params.stop_token_ids))[:40]
        faults.append(Fault("stop_token_ids", shown, f"must be ids below {model.shape.vocab_size}"))
    return replace(params, temperature=0.0) if params.temperature < GREEDY_BELOW else params


def _ids(row: dict[str, Any], model: LoadedModel, faults: list[Fault]) -> list[int]:
    ids, text = row.get("input_ids"), row.get("text")
    if (ids is None) == (text is None):
        faults.append(Fault("input_ids", "", "exactly one of text and input_ids is needed"))
        return []
    if text is not None:
        if not isinstance(text, str) or model.tokenizer is None:
            reason = "must be a text" if not isinstance(text, str) else "the model has no tokenizer"
            faults.append(Fault("text", "", reason))
            return []
        ids = list(model.tokenizer(text)["input_ids"])
    vocabulary = model.shape.vocab_size
    if not isinstance(ids, list) or not ids:
        faults.append(Fault("input_ids", "", "the prompt must be a list of at least one token id"))
        return []
    if not _all_tokens(ids, vocabulary):
        at = next(i for i, token in enumerate(ids) if not _all_tokens([token], vocabulary))
        faults.append(
            Fault(f"input_ids[{at}]", str(ids[at])[:40], f"must be an id from 0 to {vocabulary - 1}")
        )
        return []
    return ids


def _all_tokens(ids: list[Any] | tuple[int, ...], vocabulary: int) -> bool:
    return all(type(i) is int and 0 <= i < vocabulary for i in ids)
