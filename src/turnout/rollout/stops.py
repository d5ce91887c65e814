"""Where a response ends that was made by more than one request.

An engine looks for stop texts in what one request makes: one that lies across the seam, or came with the last token
before an engine died, is found here. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

TAIL_TOKENS = 8  # more than the longest stop has characters: tokens that decode to nothing


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...


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
