"""A streamed /generate: its events as what is new, and at the end the whole reply.

Events hold all tokens so far, or only their own (SGLang with --incremental-streaming-output, this engine with the
flag of the same name); `completion_tokens` tells which. Promises: each token is told once, with its log-prob and
its version; from the first token without a finite log-prob on nothing is told any more, and the end is an ABORT.
Where an engine does not say which version made which token, those of an event are put down to the label that held
when the event before it came: of two versions the older one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from turnout.core.record import record
from turnout.core.types import Finish
from turnout.core.version import VersionSpans, label_counter
from turnout.protocol.sglang import GenerateReply, finite_logprobs, mixed_ranges, parse_reply, span_rows


@record
class PartialReply:
    """Tokens that were told for the first time; `kv_mixed` is 1 for those made on KV of older weights. `engine_id`:
    who made them; `among`: the engines of which one did, where that is not known."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[tuple[int, str], ...]
    kv_mixed: tuple[int, ...]
    engine_id: str
    among: tuple[str, ...] = ()

    def parted(self, engine_id: str) -> tuple[PartialReply, PartialReply]:
        """Its first token, which the engine of this id made, and the others."""
        (tokens, label), *rest = self.spans
        later = ((tokens - 1, label), *rest) if tokens > 1 else tuple(rest)
        ids, logprobs, mixed = self.output_ids, self.logprobs, self.kv_mixed
        first = PartialReply(ids[:1], logprobs[:1], ((1, label),), mixed[:1], engine_id)
        return first, PartialReply(ids[1:], logprobs[1:], later, mixed[1:], self.engine_id)


class Stream:
    """The events of one request in order. `asked` is its max_new_tokens, `label` what the engine served when it was
    sent, `engine_id` who answers."""

    def __init__(self, asked: int, label: str, engine_id: str) -> None:
        self._asked, self._engine_id = asked, engine_id
        self._label = label if label_counter(label) is not None else ""
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans = VersionSpans()
        self._mixed: list[tuple[int, int]] = []
        self._lame = False  # a token without a log-prob came

    def take(self, row: Any) -> list[PartialReply | GenerateReply]:
        """What this event brought: tokens, if any, and the whole reply where it is the last. Raises ValueError for
        an unknown shape, and where tokens between two events are missing."""
        meta = row.get("meta_info") if isinstance(row, dict) else None
        if not isinstance(meta, dict) or not isinstance(row.get("output_ids"), list):
            raise ValueError(f"an event has text, output_ids and meta_info; this one is {str(row)[:80]}")
        final = meta.get("finish_reason") is not None
        told = len(self._ids)
        ids, pairs = self._new(row["output_ids"], meta, final)
        logprobs = [] if self._lame else finite_logprobs(ids, pairs)
        items: list[PartialReply | GenerateReply] = []
        if logprobs:
            items.append(self._told(ids[: len(logprobs)], logprobs, meta))
        self._lame = self._lame or len(logprobs) < len(ids)
        if final:
            items.append(self._whole(row, ids[len(self._ids) - told :]))
        return items

    def _new(self, claimed: list[Any], meta: dict[str, Any], final: bool) -> tuple[list[int], list[Any]]:
        """The ids of an event that were not told yet, and their pairs of log-prob and id."""
        told = len(self._ids)
        first = int(meta.get("completion_tokens", len(claimed))) - len(claimed)
        if first not in (0, told) and not self._lame:
            raise ValueError(f"an event begins at token {first}, {told} were told")
        if first == 0 and len(claimed) < told and not final:
            raise ValueError(f"an event has {len(claimed)} tokens, {told} were told")
        pairs = meta.get("output_token_logprobs") or []
        skip = max(0, told - first)
        return [int(token) for token in claimed[skip:]], pairs[skip:]

    def _told(self, ids: list[int], logprobs: list[float], meta: dict[str, Any]) -> PartialReply:
        first = len(self._ids)
        self._ids += ids
        self._logprobs += logprobs
        last = len(self._ids)
        runs = span_rows(meta, first, last)
        if runs is None:
            label = str(meta.get("weight_version") or "unknown")
            runs = ((last - first, self._label or label),)
            self._label = label
        for tokens, label in runs:
            self._spans = self._spans.extended(tokens, label)
        self._mixed = mixed_ranges(meta)
        marks = tuple(int(any(a <= at < b for a, b in self._mixed)) for at in range(first, last))
        return PartialReply(tuple(ids), tuple(logprobs), runs, marks, self._engine_id)

    def _whole(self, row: dict[str, Any], untold: list[int]) -> GenerateReply:
        """`untold` are tokens that can't be told, for want of a log-prob."""
        known = [[p, i, None] for p, i in zip(self._logprobs, self._ids)]
        meta = {**row["meta_info"], "output_token_logprobs": known}
        reply = parse_reply({**row, "output_ids": self._ids + untold, "meta_info": meta}, self._asked)
        if self._lame and reply.finish is not Finish.ABORT:
            reply = replace(reply, finish=Finish.ABORT, message="tokens without a finite log-prob")
        return replace(reply, spans=self._spans.runs)
