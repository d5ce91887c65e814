"""Where a response ends that was made by more than one request.

An engine looks for the end in what one request makes: a stop text that lies across the seam, or an end that came
with the last token before an engine or the run itself died, is found here. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from turnout.protocol.sglang import SamplingParams

TAIL_TOKENS = 8  # more than the longest stop has characters: tokens that decode to nothing


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a response."""
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...


def ended(decoder: Decoder, params: SamplingParams, ids: Sequence[int], first: int) -> bool:
    """Whether the last of a response's `ids` ended the turn that begins at `first`. As engines do it: not among the
    first min_new_tokens, and with ignore_eos no id ends anything."""
    if params.ignore_eos or len(ids) <= max(first, params.min_new_tokens):
        return False
    return ids[-1] in decoder.eos_ids or ids[-1] in params.stop_token_ids


def stopped_at(
    decoder: Decoder, stops: Sequence[str], ids: Sequence[int], seam: int, since: int = 0
) -> int | None:
    """How many of `ids` a response has that ends with a stop text which begins before the token `seam`; None where
    none does. Looks no further than a stop text can reach, and not at the first `since` tokens again."""
    reach = max((len(stop) for stop in stops), default=0)
    if not reach or not seam:
        return None
    first = max(0, seam - reach - TAIL_TOKENS)
    for count in range(max(seam, since), min(len(ids), seam + reach) + 1):
        text = decoder.decode(ids[first:count], skip_special_tokens=True)
        if any(stop in text for stop in stops if stop):
            return count
    return None
