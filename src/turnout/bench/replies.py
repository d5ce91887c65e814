"""Answers of an engine as typed values; what does not have SGLang's shape is a failure that says so.

A refusal is told apart from a missing capability here, once: 404, 405 and 501, and a 400 that says "not
supported" (or served, implemented, enabled) mean that the engine lacks it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from turnout.bench.registry import CapabilityAbsent, CheckFailed
from turnout.serving.exchange import Answer

_LACKS = re.compile(
    r"\b(not|isn't|only)( yet)? (been )?(supported|served|implemented|enabled)|unsupported", re.IGNORECASE
)


@dataclass(frozen=True)
class Reply:
    """One finished generation. `logprobs` is empty where none were asked for; `versions` are (label, start,
    end); `matched` is what ended a stop, None where the engine does not say."""

    rid: str
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
    message: str
    matched: Any
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    version: str
    versions: tuple[tuple[str, int, int], ...]
    meta: dict[str, Any]


def lacks(answer: Answer) -> bool:
    """Whether this answer says that the engine does not have what was asked for."""
    return answer.status in (404, 405, 501) or (
        answer.status == 400 and _LACKS.search(answer.message) is not None
    )


def must(answer: Answer, *statuses: int) -> Answer:
    """The answer, where its status is one of these (200 by default)."""
    allowed = statuses or (200,)
    if answer.status in allowed:
        return answer
    if lacks(answer):
        raise CapabilityAbsent(f"{answer.path} answered {answer.status}: {answer.message}")
    wanted = " or ".join(map(str, allowed))
    raise CheckFailed(f"{answer.path} answered {answer.status}, not {wanted}: {answer.message}")


def refused(answer: Answer, *mentions: str) -> str:
    """The message of a refusal (a 4xx that is not "no such endpoint") that contains each of `mentions`."""
    if answer.status in (404, 405, 501):
        raise CapabilityAbsent(f"{answer.path} answered {answer.status}")
    if not 400 <= answer.status < 500:
        raise CheckFailed(f"{answer.path} answered {answer.status}, not a refusal: {answer.message}")
    missing = [text for text in mentions if text not in answer.message]
    if missing:
        raise CheckFailed(f"{answer.path} refuses without naming {', '.join(missing)}: {answer.message}")
    return answer.message


def rows(answer: Answer) -> dict[str, Any]:
    """The JSON object of a good answer."""
    row = must(answer).row
    if not isinstance(row, dict):
        raise CheckFailed(f"{answer.path} answered no JSON object: {answer.text[:200]!r}")
    return row


def reply_of(row: Any) -> Reply:
    """A reply of /generate or the data of one of its events; raises CheckFailed for another shape."""
    try:
        return _reply(row)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as fault:
        raise CheckFailed(f"a reply of /generate of another shape ({fault!r}): {str(row)[:200]}") from fault


def piece(reply: Reply, start: int, end: int) -> Reply:
    """The reply with its tokens and log-probs from `start` to `end` only."""
    return replace(reply, tokens=reply.tokens[start:end], logprobs=reply.logprobs[start:end])


def _reply(row: Any) -> Reply:
    meta = row["meta_info"]
    pairs = meta.get("output_token_logprobs") or []
    tokens = tuple(int(t) for t in row.get("output_ids") or [p[1] for p in pairs])
    if pairs and tuple(p[1] for p in pairs) != tokens:
        raise ValueError(f"output_ids {tokens[:8]} and the tokens of output_token_logprobs differ")
    reason = meta["finish_reason"] or {"type": ""}
    return Reply(
        rid=str(meta["id"]),
        text=str(row.get("text") or ""),
        tokens=tokens,
        logprobs=tuple(float(p[0]) for p in pairs),
        finish=str(reason["type"]),
        message=str(reason.get("message") or ""),
        matched=reason.get("matched"),
        prompt_tokens=int(meta.get("prompt_tokens") or 0),
        completion_tokens=int(meta["completion_tokens"]),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        version=str(meta.get("weight_version")),
        versions=tuple(
            (str(v["version"]), int(v["start"]), int(v["end"])) for v in meta.get("weight_versions") or []
        ),
        meta=meta,
    )
