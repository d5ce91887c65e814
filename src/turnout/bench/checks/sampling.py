"""Checks of what can be drawn and how often: seeds, top-k, top-p, min-p, the distribution itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from turnout.bench.reference import log_softmax
from turnout.bench.registry import CapabilityAbsent, check, expect
from turnout.bench.replies import Reply
from turnout.bench.target import Target

DRAWS = 384
BINS = 12  # groups of tokens, from likely to unlikely, of about equal probability
HOT = 2.0  # a flat distribution: more tokens are likely enough to be counted


async def need_seeds(t: Target) -> None:
    """Raises CapabilityAbsent where two requests with one seed differ, alone and right after one another
    (CheckFailed for an engine that promises seeds)."""
    one, two = [await t.generate(t.prompt(1), 24, temperature=1.0, sampling_seed=11) for _ in range(2)]
    if one.tokens != two.tokens:
        expect(not t.facts.ours, "one sampling_seed twice gave different tokens")
        raise CapabilityAbsent("one sampling_seed twice gave different tokens: seeds are not used")


@check("sampling")
async def seed_decides(t: Target) -> str:
    """One seed gives the same tokens again; another seed, and none, give others."""
    await need_seeds(t)
    seeds = [11, 11, 12, None, None]
    asked = [t.generate(t.prompt(1), 24, temperature=1.0, sampling_seed=s) for s in seeds]
    a, again, other, free, free_again = [reply.tokens for reply in await t.together(asked)]
    expect(a == again, "one seed twice, side by side, gave different tokens")
    expect(len({a, other, free, free_again}) == 4, "different seeds, or none, gave equal tokens")
    return "equal for one seed, four different responses for 11, 12 and no seed twice"


@check("sampling")
async def seed_in_company(t: Target) -> str:
    """A seeded request gives the same tokens and log-probs alone and among others of all kinds."""
    await need_seeds(t)
    asked = [{"temperature": 0.5 + at / 4, "sampling_seed": at, "top_p": 1.0 - at / 16} for at in range(6)]
    alone = [await t.generate(ids, 20, **more) for ids, more in zip(t.prompts(6), asked)]
    company = await t.together([t.generate(ids, 20, **more) for ids, more in zip(t.prompts(6), asked)])
    differ = [at for at in range(6) if alone[at].tokens != company[at].tokens]
    expect(not differ, f"requests {differ} of 6 gave other tokens in company")
    exact = all(a.logprobs == b.logprobs for a, b in zip(alone, company))
    expect(exact or not t.facts.ours, "log-probs differ in company")
    return f"6 requests, 120 tokens equal, log-probs {'equal bit for bit' if exact else 'close'}"


@check("sampling")
async def top_k_1_is_greedy(t: Target) -> str:
    """top_k 1 at a high temperature draws the greedy tokens."""
    greedy = await t.together([t.generate(ids, 16) for ids in t.prompts(4)])
    drawn = await t.together([t.generate(ids, 16, temperature=1.9, top_k=1) for ids in t.prompts(4)])
    for one, other in zip(greedy, drawn):
        at = next((i for i, (a, b) in enumerate(zip(one.tokens, other.tokens)) if a != b), None)
        expect(at is None, f"token {at} is {other.tokens[at or 0]}, greedily {one.tokens[at or 0]}")
    return "64 tokens equal to the greedy ones at temperature 1.9"


async def _support(
    t: Target, allowed: Callable[[NDArray[np.float64]], NDArray[np.bool_]], **more: float
) -> tuple[int, int]:
    """How many drawn tokens lie outside what the reference allows, and how many would without the filter."""
    asked = [t.generate(t.prompt(30 + at), 24, temperature=1.0, **more) for at in range(6)]
    free = [t.generate(t.prompt(30 + at), 24, temperature=1.0) for at in range(6)]
    outside = [0, 0]
    replies = await t.together([*asked, *free])
    for at, reply in enumerate(replies):
        logprobs_TV = await t.reference.output_logprobs(t.prompt(30 + at % 6), reply.tokens)
        inside_TV = allowed(np.exp(logprobs_TV))
        outside[at // 6] += int((~inside_TV[np.arange(len(reply.tokens)), list(reply.tokens)]).sum())
    return outside[0], outside[1]


async def _supported(t: Target, name: str, limit: Callable[..., NDArray[np.float64]], **more: float) -> str:
    """`limit(probs)` is the lowest probability that may be drawn at each place; what is a little less likely
    is given away to the rounding of the engine's arithmetic."""
    slack = 1.0 - min(0.9, t.facts.tolerance * 2)
    outside, free = await _support(t, lambda probs_TV: probs_TV >= limit(probs_TV)[:, None] * slack, **more)
    expect(outside == 0, f"{outside} of 144 tokens lie outside {name} ({free} of 144 do without it)")
    expect(free > 0, f"the check is blind: no token lies outside {name} without it either")
    return f"0 of 144 tokens outside, {free} of 144 without the filter"


@check("sampling")
async def top_k_support(t: Target) -> str:
    """With top_k 5 only the five most likely tokens are drawn."""
    return await _supported(t, "top_k 5", lambda p: np.sort(p, -1)[:, -5], top_k=5)


@check("sampling")
async def top_p_support(t: Target) -> str:
    """With top_p 0.5 only tokens of the nucleus are drawn."""

    def lowest(probs_TV: NDArray[np.float64]) -> NDArray[np.float64]:
        sorted_TV = np.sort(probs_TV, -1)[:, ::-1]
        before_TV = np.cumsum(sorted_TV, -1) - sorted_TV
        return np.where(before_TV <= 0.5, sorted_TV, np.inf).min(-1)

    return await _supported(t, "top_p 0.5", lowest, top_p=0.5)


@check("sampling")
async def min_p_support(t: Target) -> str:
    """With min_p 0.2 only tokens of a fifth of the largest probability or more are drawn."""
    return await _supported(t, "min_p 0.2", lambda p: 0.2 * p.max(-1), min_p=0.2)


@check("sampling")
async def draws_follow_the_distribution(t: Target) -> str:
    """First tokens of many draws come as often as the model says (chi-square)."""
    ids = t.prompt(4)
    replies: list[Reply] = []
    for start in range(0, DRAWS, 32):
        asked = [t.generate(ids, 1, temperature=HOT, sampling_seed=start + at) for at in range(32)]
        replies += await t.together(asked)
    probs_V = np.exp(log_softmax((await t.reference.logits(ids))[-1:] / HOT)[0])
    seen = Counter(reply.tokens[0] for reply in replies)
    order = np.argsort(-probs_V)
    bin_V = np.minimum((np.cumsum(probs_V[order]) * BINS).astype(int), BINS - 1)
    chi2, bins = 0.0, sorted(set(bin_V.tolist()))
    for number in bins:
        members = order[bin_V == number]
        expected = float(probs_V[members].sum()) * DRAWS
        chi2 += (sum(seen[int(v)] for v in members) - expected) ** 2 / expected
    freedom = len(bins) - 1
    limit = freedom + 5.0 * (2.0 * freedom) ** 0.5  # five standard deviations above what chance gives
    told = f"chi-square {chi2:.1f} at {freedom} degrees of freedom over {DRAWS} draws"
    expect(freedom >= 3, f"the check is blind: {len(bins)} groups of tokens")
    expect(chi2 <= limit, f"{told}; at most {limit:.0f} is chance")
    return told
