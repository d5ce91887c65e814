"""Comparing generations: exactly for engines that promise bits, within a tolerance for others.

Two greedy generations of an engine that does not promise bits may part where two tokens are nearly equally
likely; after that place they say nothing of one another.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnout.bench.registry import CheckFailed
from turnout.bench.replies import Reply


def difference(want: Reply, seen: Reply, tolerance: float) -> str:
    """How `seen` differs from `want`, "" where it does not: equal tokens with log-probs within the tolerance,
    up to a place where they chose different tokens of nearly one log-prob (a third of the tolerance)."""
    for at, (token, other) in enumerate(zip(want.tokens, seen.tokens)):
        gap = abs(want.logprobs[at] - seen.logprobs[at])
        if gap > tolerance:
            return (
                f"at token {at} log-prob {seen.logprobs[at]:.4f} of {other}, "
                f"not {want.logprobs[at]:.4f} of {token}"
            )
        if token != other:
            return "" if gap < tolerance / 3 else f"token {at} is {other}, not {token}"
    if len(want.tokens) != len(seen.tokens):
        return f"{len(seen.tokens)} tokens, not {len(want.tokens)}"
    return ""


def largest_gap(want: Sequence[Reply], seen: Sequence[Reply]) -> float:
    """The largest difference of log-probs over the tokens that two lists of replies share."""
    return max(
        (
            abs(a - b)
            for one, other in zip(want, seen)
            for a, b, same in zip(one.logprobs, other.logprobs, map(int.__eq__, one.tokens, other.tokens))
            if same
        ),
        default=0.0,
    )


def equal(want: Sequence[Reply], seen: Sequence[Reply], tolerance: float, what: str) -> str:
    """Evidence that two lists of replies agree; raises CheckFailed with the first that does not."""
    for at, (one, other) in enumerate(zip(want, seen, strict=True)):
        found = difference(one, other, tolerance)
        if found:
            raise CheckFailed(f"{what}, prompt {at}: {found}")
    tokens = sum(len(reply.tokens) for reply in seen)
    gap = largest_gap(want, seen)
    return f"{tokens} tokens of {len(seen)} replies, largest log-prob difference {gap:.2g}"
