"""The bodies of HTTP calls as typed values. Every refusal is a UserError with all faults of the body, raised
before the compute thread hears of it."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turnout.core.errors import Fault, UserError
from turnout.engine.core import PAUSE_MODES
from turnout.engine.model import LoadedModel
from turnout.engine.scheduler_machine import Request
from turnout.engine.settings import EngineSettings
from turnout.protocol.sglang import SamplingParams

RID_MAX = 256
STOPS_MAX = 16
GREEDY_BELOW = 1e-6  # a temperature below this is greedy, as in SGLang 0.5.23
NOT_SERVED = ("stream", "image_data", "lora_path", "input_embeds")


class BadRequest(UserError):
    """A body that is refused with 400."""

    title = "request refused"


@dataclass(frozen=True)
class Update:
    """POST /update_weights_from_disk. `label` None means: the version that the folder's manifest names."""

    folder: Path
    label: str | None
    abort_all: bool
    flush: bool


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object; an empty body is an empty object."""
    try:
        row = json.loads(body) if body.strip() else {}
    except ValueError as fault:
        raise BadRequest(Fault("body", "", f"is not JSON: {fault}")) from fault
    if not isinstance(row, dict):
        raise BadRequest(Fault("body", type(row).__name__, "must be a JSON object"))
    return row


def parse_generate(row: dict[str, Any], model: LoadedModel) -> Request:
    """One generation. Needs `text` or `input_ids`; prompt plus max_new_tokens must fit the context, as in
    SGLang 0.5.23, which refuses rather than clamps."""
    faults = [Fault(name, "", "is not served by this engine") for name in NOT_SERVED if row.get(name)]
    rid = row.get("rid")
    if rid is None:
        rid = secrets.token_hex(16)
    if not isinstance(rid, str) or not 0 < len(rid) <= RID_MAX:
        faults.append(Fault("rid", str(rid)[:40], f"must be a text of 1 to {RID_MAX} characters"))
    params = _params(row.get("sampling_params"), model, faults)
    ids = _prompt(row, model, faults)
    context = model.shape.context_length
    if params is not None and ids and len(ids) + params.max_new_tokens > context:
        faults.append(
            Fault(
                "max_new_tokens",
                str(params.max_new_tokens),
                f"{len(ids)} prompt tokens and {params.max_new_tokens} new ones are "
                f"{len(ids) + params.max_new_tokens} in all, the context is {context}",
            )
        )
    if faults or params is None:
        raise BadRequest(faults)
    end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else model.shape.eos_ids)
    seed = params.sampling_seed if params.sampling_seed is not None else secrets.randbits(63)
    return Request(str(rid), ids, params, seed, end_ids)


def parse_abort(row: dict[str, Any]) -> str | None:
    """The id to abort, None for all."""
    everything, rid = row.get("abort_all", False), row.get("rid")
    if everything is True:
        return None
    if not isinstance(rid, str) or not rid:
        raise BadRequest(Fault("rid", str(rid), "must be the id of one request, or abort_all true"))
    return rid


def parse_pause(row: dict[str, Any]) -> str:
    mode = row.get("mode", "abort")
    if mode not in PAUSE_MODES:
        raise BadRequest(Fault("mode", str(mode), f"must be one of {', '.join(PAUSE_MODES)}"))
    return mode


def parse_update(row: dict[str, Any], settings: EngineSettings) -> Update:
    """Defaults as in SGLang 0.5.23: abort_all_requests false, flush_cache true."""
    faults: list[Fault] = []
    path, label, load_format = row.get("model_path"), row.get("weight_version"), row.get("load_format")
    if not isinstance(path, str) or not path or "\0" in path:
        raise BadRequest(Fault("model_path", str(path), "must be a folder"))
    if label is not None and (not isinstance(label, str) or not 0 < len(label) <= RID_MAX):
        faults.append(Fault("weight_version", str(label)[:40], "must be a text"))
    if load_format not in (None, "auto", "safetensors"):
        faults.append(Fault("load_format", str(load_format), "must be auto or safetensors"))
    flags = {}
    for name, default in (("abort_all_requests", False), ("flush_cache", True)):
        flags[name] = row.get(name, default)
        if not isinstance(flags[name], bool):
            faults.append(Fault(name, str(flags[name]), "must be true or false"))
    folder = Path(path).resolve()
    roots = [root.resolve() for root in settings.allowed_roots]
    if not any(folder.is_relative_to(root) for root in roots) and (roots or not settings.loopback):
        faults.append(Fault("model_path", path, "lies outside the folders that updates may read from"))
    if faults:
        raise BadRequest(faults)
    return Update(folder, label, flags["abort_all_requests"], flags["flush_cache"])


def parse_label(row: dict[str, Any]) -> tuple[str, bool]:
    """Label and whether to abort all requests (SGLang's default is true) of /update_weight_version."""
    label, abort_all = row.get("new_version"), row.get("abort_all_requests", True)
    faults: list[Fault] = []
    if not isinstance(label, str) or not 0 < len(label) <= RID_MAX:
        faults.append(Fault("new_version", str(label)[:40], "must be a text"))
    if not isinstance(abort_all, bool):
        faults.append(Fault("abort_all_requests", str(abort_all), "must be true or false"))
    if faults:
        raise BadRequest(faults)
    return str(label), bool(abort_all)


def _params(row: Any, model: LoadedModel, faults: list[Fault]) -> SamplingParams | None:
    if row is not None and not isinstance(row, dict):
        faults.append(Fault("sampling_params", type(row).__name__, "must be an object"))
        return None
    row = row or {}
    stop, seed = row.get("stop"), row.get("sampling_seed")
    if isinstance(stop, str):
        stop = [stop]
    if stop and (not isinstance(stop, list) or not all(isinstance(s, str) for s in stop)):
        faults.append(Fault("stop", str(stop)[:40], "must be a text or a list of texts"))
        return None
    if stop and (len(stop) > STOPS_MAX or model.tokenizer is None):
        faults.append(Fault("stop", "", f"at most {STOPS_MAX}, and only where the model has a tokenizer"))
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        faults.append(Fault("sampling_seed", str(seed)[:40], "must be a whole number"))
    ids = row.get("stop_token_ids") or []
    if not isinstance(ids, list) or not _all_tokens(ids, model.shape.vocab_size):
        faults.append(
            Fault("stop_token_ids", str(ids)[:40], f"must be a list of ids below {model.shape.vocab_size}")
        )
        return None
    if row.get("n") not in (None, 1):
        faults.append(Fault("n", str(row["n"])[:40], "must be 1: one request, one response"))
    try:
        params = SamplingParams.from_json({**row, "stop": stop})
    except (ValueError, TypeError) as fault:
        faults.append(Fault("sampling_params", "", str(fault)))
        return None
    return replace(params, temperature=0.0) if params.temperature < GREEDY_BELOW else params


def _prompt(row: dict[str, Any], model: LoadedModel, faults: list[Fault]) -> list[int]:
    ids, text = row.get("input_ids"), row.get("text")
    if (ids is None) == (text is None):
        faults.append(Fault("input_ids", "", "exactly one of text and input_ids is needed"))
        return []
    if text is not None:
        if not isinstance(text, str) or model.tokenizer is None:
            reason = "must be one text" if not isinstance(text, str) else "the model has no tokenizer"
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


def _all_tokens(ids: list[Any], vocabulary: int) -> bool:
    return all(type(i) is int and 0 <= i < vocabulary for i in ids)
