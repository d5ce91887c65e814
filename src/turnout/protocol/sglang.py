"""SGLang's native HTTP API, the one language spoken to every engine. Checked against SGLang 0.5.23.

Both ends use this file: turnout.serving.client builds requests and parses replies, turnout.engine.server
parses requests and builds replies. Unknown fields are ignored, as SGLang does. What Turnout adds to the API
is marked "ours" and can be ignored by any other client.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from turnout.core.types import Finish


@dataclass(frozen=True)
class SamplingParams:
    """SGLang's `sampling_params`. temperature 0 is greedy; top_k -1 is off; `sampling_seed` None lets the
    engine choose. The noise of a token depends on the seed and its absolute position only."""

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

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> SamplingParams:
        """Raises ValueError that names the field for a value of the wrong kind or out of range."""
        stop = row.get("stop") or ()
        params = cls(
            max_new_tokens=_integer(row, "max_new_tokens", 128, low=0),
            min_new_tokens=_integer(row, "min_new_tokens", 0, low=0),
            temperature=_number(row, "temperature", 1.0, low=0.0),
            top_p=_number(row, "top_p", 1.0, low=0.0, high=1.0),
            top_k=_integer(row, "top_k", -1, low=-1),
            min_p=_number(row, "min_p", 0.0, low=0.0, high=1.0),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(row.get("stop_token_ids") or ()),
            ignore_eos=bool(row.get("ignore_eos", False)),
            skip_special_tokens=bool(row.get("skip_special_tokens", True)),
            sampling_seed=row.get("sampling_seed"),
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


@dataclass(frozen=True)
class GenerateRequest:
    """One POST /generate. `rid` is chosen by the client, fixed-length and random; never empty."""

    rid: str
    input_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    return_logprob: bool = True
    extra_key: str | None = None

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "rid": self.rid,
            "input_ids": list(self.input_ids),
            "sampling_params": self.params.to_json(),
            "return_logprob": self.return_logprob,
            "stream": False,
        }
        if self.extra_key is not None:
            row["extra_key"] = self.extra_key
        return row


@dataclass(frozen=True)
class GenerateReply:
    """The answer to one /generate: tokens, log-probs as sampled, why it ended, which version made which
    token (`spans`: ((tokens, label), ...)). `text` is the engine's own decoding."""

    text: str
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    message: str
    spans: tuple[tuple[int, str], ...]
    prompt_tokens: int
    cached_tokens: int

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
            },
        }


def parse_reply(row: Any, asked: int) -> GenerateReply:
    """A reply of any known shape. Tokens beyond the last one with a log-prob are cut, and the reply is then
    an ABORT (a token without log-prob can't train). "length" with fewer tokens than `asked`, or with none,
    is an ABORT too: a PD pair that lost its other half answers so. Raises ValueError for an unknown shape."""
    if isinstance(row, list) and len(row) == 1:
        row = row[0]
    if not isinstance(row, dict) or not isinstance(row.get("meta_info"), dict):
        raise ValueError(
            f"a reply to /generate has text, output_ids and meta_info; this one is {_shape(row)}"
        )
    meta = row["meta_info"]
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    message = str(reason.get("message") or "") if isinstance(reason, dict) else ""
    if kind not in {f.value for f in Finish}:
        raise ValueError(f"unknown finish_reason {reason!r}")
    finish = Finish(kind)
    pairs = meta.get("output_token_logprobs") or []
    ids = [int(t) for t in (row.get("output_ids") or [p[1] for p in pairs])]
    logprobs = [float(p[0]) for p in pairs][: len(ids)]
    if len(logprobs) < len(ids) or not all(map(math.isfinite, logprobs)):
        good = next((i for i, p in enumerate(logprobs) if not math.isfinite(p)), len(logprobs))
        ids, logprobs, finish = ids[:good], logprobs[:good], Finish.ABORT
        message = message or "tokens without a finite log-prob"
    if finish is Finish.LENGTH and len(ids) < asked:
        finish, message = Finish.ABORT, f"said length after {len(ids)} of {asked} tokens"
    return GenerateReply(
        text=str(row.get("text", "")),
        output_ids=tuple(ids),
        logprobs=tuple(logprobs),
        finish=finish,
        message=message,
        spans=_spans(meta, len(ids)),
        prompt_tokens=int(meta.get("prompt_tokens") or 0),
        cached_tokens=int(meta.get("cached_tokens") or 0),
    )


def _spans(meta: dict[str, Any], tokens: int) -> tuple[tuple[int, str], ...]:
    """Per-token versions where the engine reports them, else one span of its single label."""
    runs = [
        (min(int(v["end"]), tokens) - int(v["start"]), str(v["version"]))
        for v in meta.get("weight_versions") or []
        if int(v["start"]) < tokens
    ]
    if sum(n for n, _ in runs) == tokens and all(n > 0 for n, _ in runs):
        return tuple(runs)
    return ((tokens, str(meta.get("weight_version", "")) or "unknown"),) if tokens else ()


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
        for key in ("num_total_reqs", "num_reqs"):
            if key in row:
                return int(row[key])
        if "num_running_reqs" in row and "num_waiting_reqs" in row:
            return int(row["num_running_reqs"]) + int(row["num_waiting_reqs"])
    return None


def _integer(row: dict[str, Any], name: str, default: int, low: int) -> int:
    value = row.get(name, default)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} must be a whole number of at least {low}, not {value!r}")
    return value


def _number(row: dict[str, Any], name: str, default: float, low: float, high: float = float("inf")) -> float:
    value = row.get(name, default)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")
    return float(value)


def _shape(row: Any) -> str:
    if isinstance(row, dict):
        return "an object with " + ", ".join(sorted(map(str, row))[:8])
    return f"a list of {len(row)}" if isinstance(row, list) else type(row).__name__
