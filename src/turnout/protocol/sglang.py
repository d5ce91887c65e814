"""SGLang's native HTTP API, the one language spoken to every engine. Checked against SGLang 0.5.23.

Both ends use this file: turnout.serving.client builds requests and parses replies, turnout.engine.server
parses requests and builds replies. Unknown fields are ignored, as SGLang does. What Turnout adds to the API
is marked "ours" and can be ignored by any other client.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from turnout.core.record import record
from turnout.core.types import Finish
from turnout.protocol.pd import Bootstrap

T = TypeVar("T", str, int)
ENGINE_HEADER = "X-Turnout-Engine"  # ours: the id of the engine that answers, for who asked through a router
RETURN_TEXT = "return_text"  # ours, in the body of /generate: false where nobody reads the reply's text


@dataclass(frozen=True)
class SamplingParams:
    """SGLang's `sampling_params`. temperature 0 is greedy; top_k -1 is off; `sampling_seed` None lets the
    engine choose. The noise of a token depends on the seed and its absolute position only. `stream_interval`: new
    tokens that an event of a stream waits for; the first comes at once, the last event with whatever is left."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    sampling_seed: int | None = None
    stream_interval: int | None = None

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> SamplingParams:
        """Raises ValueError that names the field for a value of the wrong kind or out of range."""
        params = cls(
            max_new_tokens=_integer(row, "max_new_tokens", 128, low=0),
            min_new_tokens=_integer(row, "min_new_tokens", 0, low=0),
            temperature=_number(row, "temperature", 1.0, low=0.0),
            top_p=_number(row, "top_p", 1.0, low=0.0, high=1.0),
            top_k=_integer(row, "top_k", -1, low=-1),
            min_p=_number(row, "min_p", 0.0, low=0.0, high=1.0),
            stop=_items(row, "stop", str),
            stop_token_ids=_items(row, "stop_token_ids", int),
            ignore_eos=_flag(row, "ignore_eos", False),
            skip_special_tokens=_flag(row, "skip_special_tokens", True),
            sampling_seed=None if row.get("sampling_seed") is None else _integer(row, "sampling_seed", 0),
            stream_interval=None
            if row.get("stream_interval") is None
            else _integer(row, "stream_interval", 1, low=1),
        )
        if params.top_p == 0.0 or params.top_k == 0:
            raise ValueError("top_p must be above 0 and top_k -1 or at least 1")
        return params

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            name: getattr(self, name) for name in self.__dataclass_fields__ if getattr(self, name) is not None
        }
        row["stop"], row["stop_token_ids"] = list(self.stop), list(self.stop_token_ids)
        return row


@record
class GenerateRequest:
    """One POST /generate. `rid` is chosen by the client, fixed-length and random; never empty. `bootstrap` is there
    where the two halves of a PD pair get the same request (docs/guides/pd.md). Requests of one `routing_key` a
    router sends to one engine (empty: to any); it is no part of the body. `routed_from`: from which position on the
    experts of a mixture are asked for (None: they are not). Text isn't asked for: who wants it decodes the ids."""

    rid: str
    input_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    return_logprob: bool = True
    extra_key: str | None = None
    bootstrap: Bootstrap | None = None
    routing_key: str = ""
    routed_from: int | None = None

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "rid": self.rid,
            "input_ids": list(self.input_ids),
            "sampling_params": self.params.to_json(),
            "return_logprob": self.return_logprob,
            "stream": False,
            RETURN_TEXT: False,
        }
        if self.extra_key is not None:
            row["extra_key"] = self.extra_key
        if self.routed_from is not None:
            row |= {"return_routed_experts": True, "routed_experts_start_len": self.routed_from}
        return row if self.bootstrap is None else row | self.bootstrap.to_json()


@record
class GenerateReply:
    """The answer to one /generate: tokens, log-probs as sampled, why it ended, which version made which
    token (`spans`: ((tokens, label), ...)). `text` is the engine's own decoding, if it was asked for. `kv_mixed`:
    [start, end) of tokens made on KV of older weights than their own. `routed`: int16 rows of the experts of each
    position but the last, from the one that was asked for (SGLang's `routed_experts`, int32 in base64)."""

    text: str
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    message: str
    spans: tuple[tuple[int, str], ...]
    prompt_tokens: int
    cached_tokens: int
    kv_mixed: tuple[tuple[int, int], ...] = ()
    routed: bytes = b""

    def to_json(self, rid: str) -> dict[str, Any]:
        """SGLang's shape, with `weight_versions` as SGLang 0.5.23 reports it: [{version, start, end}]."""
        versions, start = [], 0
        for tokens, label in self.spans:
            versions.append({"version": label, "start": start, "end": start + tokens})
            start += tokens
        finish: dict[str, Any] = {"type": self.finish.value}
        if self.finish is Finish.ABORT:
            finish["message"] = self.message
        elif self.finish is Finish.LENGTH:
            finish["length"] = len(self.output_ids)
        return {
            "text": self.text,
            "output_ids": list(self.output_ids),
            "meta_info": {
                "id": rid,
                "finish_reason": finish,
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": len(self.output_ids),
                "cached_tokens": self.cached_tokens,
                "weight_version": self.spans[-1][1] if self.spans else "",
                "weight_versions": versions,
                "output_token_logprobs": [[p, t, None] for p, t in zip(self.logprobs, self.output_ids)],
                **({"kv_mixed": [list(run) for run in self.kv_mixed]} if self.kv_mixed else {}),
            },
        }


def parse_reply(row: Any, asked: int) -> GenerateReply:
    """A reply of any known shape. Tokens beyond the last one with a log-prob are cut, and the reply is then
    an ABORT (a token without log-prob can't train), as is a text without tokens. "length" with fewer tokens
    than `asked`, or with none, is an ABORT too: a PD pair that lost its other half answers so. Raises
    ValueError for an unknown shape."""
    if isinstance(row, list) and len(row) == 1:
        row = row[0]
    if not isinstance(row, dict) or not isinstance(row.get("meta_info"), dict):
        raise ValueError(
            f"a reply to /generate has text, output_ids and meta_info; this one is {_shape(row)}"
        )
    meta = row["meta_info"]
    finish, message = finish_of(meta.get("finish_reason"))
    pairs = meta.get("output_token_logprobs") or []
    claimed = [int(t) for t in (row.get("output_ids") or [p[1] for p in pairs])]
    logprobs = finite_logprobs(claimed, pairs)
    ids = claimed[: len(logprobs)]
    text = str(row.get("text") or "")
    if len(ids) < len(claimed):
        finish, message = Finish.ABORT, message or "tokens without a finite log-prob"
    if text and not ids:
        finish, message = Finish.ABORT, message or "a text without tokens"
    if finish is Finish.LENGTH and len(ids) < asked:
        finish, message = Finish.ABORT, f"said length after {len(ids)} of {asked} tokens"
    spans, label = span_rows(meta, 0, len(ids)), str(meta.get("weight_version") or "unknown")
    return GenerateReply(
        text=text,
        output_ids=tuple(ids),
        logprobs=tuple(logprobs),
        finish=finish,
        message=message,
        spans=() if not ids else spans if spans is not None else ((len(ids), label),),
        prompt_tokens=int(meta.get("prompt_tokens") or 0),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        kv_mixed=tuple(mixed_ranges(meta)),
        routed=routed_rows(meta.get("routed_experts")),
    )


def routed_rows(told: str | None) -> bytes:
    """SGLang's `routed_experts` (base64 of int32 [positions, layers, experts of a token]) as int16."""
    return np.frombuffer(base64.b64decode(told), "<i4").astype("<i2").tobytes() if told else b""


def routed_text(rows: bytes) -> str:
    """The way back."""
    return base64.b64encode(np.frombuffer(rows, "<i2").astype("<i4").tobytes()).decode()


def finish_of(reason: Any) -> tuple[Finish, str]:
    """The finish and its message; SGLang sends an object, older servers and routers a plain text. Raises ValueError
    for any other."""
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if not isinstance(kind, str) or kind not in {f.value for f in Finish}:
        raise ValueError(f"unknown finish_reason {reason!r}")
    return Finish(kind), str(reason.get("message") or "") if isinstance(reason, dict) else ""


def finite_logprobs(ids: list[int], pairs: list[Any]) -> list[float]:
    """Log-probs of the first tokens, up to the first that has none, or one of another token, or not finite."""
    found: list[float] = []
    for token, pair in zip(ids, pairs):
        value = float(pair[0])
        if int(pair[1]) != token or not math.isfinite(value):
            break
        found.append(value)
    return found


def prompt_logprobs(row: Any, ids: tuple[int, ...], start: int) -> tuple[float, ...]:
    """Log-probs of the tokens `ids[start + 1:]` of a prompt, each given what precedes it, from the reply to a
    request with `logprob_start_len` = start. The row of token `start` itself has none, or one that is not asked
    for. Raises ValueError where they are not all there, of other tokens, or not finite."""
    meta: dict[str, Any] = row["meta_info"]
    pairs = meta["input_token_logprobs"]
    wanted = list(ids[start + 1 :])
    found = finite_logprobs(wanted, pairs[1:])
    if len(pairs) != len(ids) - start or len(found) != len(wanted):
        raise ValueError(
            f"{len(found)} good ones of {len(wanted)} log-probs of a prompt, in {len(pairs)} rows"
        )
    return tuple(found)


def span_rows(meta: dict[str, Any], first: int, last: int) -> tuple[tuple[int, str], ...] | None:
    """Which version made the tokens `first` to `last` (exclusive) of a response; None where the engine does not
    say it of all of them."""
    runs = [
        (min(int(v["end"]), last) - max(int(v["start"]), first), str(v["version"]))
        for v in meta.get("weight_versions") or []
        if int(v["start"]) < last and int(v["end"]) > first
    ]
    whole = sum(n for n, _ in runs) == last - first and all(n > 0 for n, _ in runs)
    return tuple(runs) if whole else None


def mixed_ranges(meta: dict[str, Any]) -> list[tuple[int, int]]:
    """Ours: [start, end) of the tokens that were made on KV of older weights than their own."""
    return [(int(start), int(end)) for start, end in meta.get("kv_mixed") or []]


def load_total(row: Any) -> int | None:
    """Requests running or waiting from any known shape of the load report; None for an unknown shape, which
    must never be read as idle. Shapes: list of loads, {loads: [...]}, {num_reqs}, {num_total_reqs},
    {num_running_reqs, num_waiting_reqs}."""
    if isinstance(row, dict) and isinstance(row.get("loads"), list):
        row = row["loads"]
    if isinstance(row, list):
        parts = [load_total(part) for part in row]
        return None if not parts or any(p is None for p in parts) else sum(p for p in parts if p is not None)
    if isinstance(row, dict):
        for keys in (("num_total_reqs",), ("num_reqs",), ("num_running_reqs", "num_waiting_reqs")):
            counts = [
                n for n in map(row.get, keys) if isinstance(n, int) and not isinstance(n, bool) and n >= 0
            ]
            if len(counts) == len(keys):
                return sum(counts)
    return None


def load_parts(row: Any) -> tuple[int, int, float] | None:
    """Requests running and waiting, and the greatest share of a KV cache in use, from a report of /v1/loads; None
    for an unknown shape."""
    try:
        loads = list(row["loads"])
        running, waiting = (sum(int(r[f"num_{what}_reqs"]) for r in loads) for what in ("running", "waiting"))
        return running, waiting, max(float(r["token_usage"]) for r in loads)
    except (KeyError, TypeError, ValueError):
        return None


def _integer(row: dict[str, Any], name: str, default: int, low: int | None = None) -> int:
    value = row.get(name, default)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or (low is not None and value < low):
        least = "" if low is None else f" of at least {low}"
        raise ValueError(f"{name} must be a whole number{least}, not {value!r}")
    return value


def _number(row: dict[str, Any], name: str, default: float, low: float, high: float = math.inf) -> float:
    value = row.get(name, default)
    value = default if value is None else value
    fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not fits or value == math.inf:
        raise ValueError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")
    return float(value)


def _flag(row: dict[str, Any], name: str, default: bool) -> bool:
    value = row.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {value!r}")
    return default if value is None else value


def _items(row: dict[str, Any], name: str, kind: type[T]) -> tuple[T, ...]:
    """A list of texts or ids; one alone is a list of one."""
    value = row.get(name)
    items: Any = () if value is None else (value,) if type(value) is kind else value
    if not isinstance(items, list | tuple) or not all(type(item) is kind for item in items):
        raise ValueError(f"{name} must be a list of {'texts' if kind is str else 'ids'}, not {value!r}")
    return tuple(items)


def _shape(row: Any) -> str:
    if isinstance(row, dict):
        return "an object with " + ", ".join(sorted(map(str, row))[:8])
    return f"a list of {len(row)}" if isinstance(row, list) else type(row).__name__
