"""Prompt pages that live requests share. Pure.

Owns which full page of a prompt lies where: a page's key is the digest of its tokens and of all before them, so
equal keys mean equal KV (a row's result depends on its own sequence only). Promises: a page is offered only while
somebody holds it and only after it was computed; `forget` ends all offers, as a change of weights must.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def page_keys(tokens: Sequence[int], page_tokens: int) -> list[bytes]:
    """Keys of the full pages of a prompt, in order; the last token is left out, since it must be computed to
    give logits."""
    keys: list[bytes] = []
    before = b""
    for end in range(page_tokens, len(tokens), page_tokens):
        text = before + repr(tokens[end - page_tokens : end]).encode()
        before = hashlib.blake2b(text, digest_size=16).digest()
        keys.append(before)
    return keys


class SharedPages:
    """The offers: key to page, and back for when a page is freed."""

    def __init__(self) -> None:
        self._page: dict[bytes, int] = {}
        self._key: dict[int, bytes] = {}

    def find(self, key: bytes) -> int | None:
        return self._page.get(key)

    def offer(self, key: bytes, page: int) -> None:
        """The page with this key was computed. A second page with the same key is not offered."""
        if key not in self._page:
            self._page[key], self._key[page] = page, key

    def freed(self, pages: Sequence[int]) -> None:
        """Nobody holds these pages any more."""
        for page in pages:
            key = self._key.pop(page, None)
            if key is not None:
                del self._page[key]

    def forget(self) -> None:
        self._page.clear()
        self._key.clear()

    def check(self, taken: set[int]) -> list[int]:
        """Pages that are offered though nobody holds them; empty when the books balance."""
        return sorted(set(self._key) - taken)
