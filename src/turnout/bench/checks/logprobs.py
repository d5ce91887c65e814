"""Checks of log-probs against a plain forward of the same checkpoint in float32.

A log-prob is log-softmax(logits / temperature) over the whole vocabulary at every place. Temperature 0 means
the raw logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnout.bench.reference import log_softmax, picked
from turnout.bench.registry import CapabilityAbsent, check, expect
from turnout.bench.replies import Reply, must, reply_of
from turnout.bench.target import Target


async def against_reference(
    t: Target, prompts: Sequence[Sequence[int]], replies: Sequence[Reply], temperature: float = 1.0
) -> str:
    """The largest and the mean difference; CheckFailed where they are above what the dtype explains."""
    gaps = []
    for ids, reply in zip(prompts, replies, strict=True):
        want_TV = await t.reference.output_logprobs(ids, reply.tokens, temperature)
        gaps.append(np.abs(picked(want_TV, reply.tokens) - np.array(reply.logprobs)))
    gap = np.concatenate(gaps)
    largest, mean, limit = float(gap.max()), float(gap.mean()), t.facts.tolerance / min(temperature, 1.0)
    told = f"{gap.size} log-probs, difference at most {largest:.2g}, mean {mean:.2g} ({t.facts.dtype})"
    expect(largest <= limit and mean <= limit / 4, f"{told}; allowed are {limit:g} and {limit / 4:g}")
    return told


@check("log-probs")
async def log_probs_equal_reference(t: Target) -> str:
    """Greedy log-probs of eight prompts are those of the reference forward."""
    replies = await t.together([t.generate(ids, 16) for ids in t.prompts()])
    return await against_reference(t, t.prompts(), replies)


@check("log-probs")
async def greedy_is_the_largest(t: Target) -> str:
    """Each greedy token has the largest log-prob of the reference, up to the tolerance."""
    worst = 0.0
    for ids, reply in zip(t.prompts(), await t.together([t.generate(ids, 16) for ids in t.prompts()])):
        want_TV = await t.reference.output_logprobs(ids, reply.tokens)
        worst = max(worst, float((want_TV.max(-1) - picked(want_TV, reply.tokens)).max()))
    expect(worst <= t.facts.tolerance, f"a greedy token lies {worst:.3f} below the most likely one")
    return f"128 tokens, at most {worst:.2g} below the reference's largest"


@check("log-probs")
async def log_probs_are_temperature_scaled(t: Target) -> str:
    """At temperatures 0.6 and 1.7 the log-probs are those of logits / temperature."""
    told = []
    for temperature in (0.6, 1.7):
        asked = [t.generate(ids, 16, temperature=temperature, sampling_seed=3) for ids in t.prompts(4)]
        replies = await t.together(asked)
        told.append(f"{temperature:g}: {await against_reference(t, t.prompts(4), replies, temperature)}")
    return "; ".join(told)


@check("log-probs")
async def log_probs_are_not_renormalised(t: Target) -> str:
    """top-k, top-p and min-p decide what is drawn, and leave the log-prob over the whole vocabulary."""
    filters = ({"top_k": 4}, {"top_p": 0.4}, {"min_p": 0.3})
    replies = await t.together([t.generate(t.prompt(3), 16, temperature=1.0, **f) for f in filters])
    return await against_reference(t, [t.prompt(3)] * len(filters), replies)


@check("log-probs")
async def log_probs_of_a_long_prompt(t: Target) -> str:
    """A prompt that is computed in several pieces gives the reference's log-probs."""
    length = min(700, t.facts.context // 2)
    ids = t.prompt(8, length)
    told = await against_reference(t, [ids], [await t.generate(ids, 8)])
    return f"{length} prompt tokens; {told}"


async def input_logprobs(t: Target, ids: Sequence[int], start: int = 0) -> list[float]:
    """The prompt's log-probs from `start` on, without the first (nothing precedes it)."""
    answer = must(await t.ask(ids, 1, logprob_start_len=start))
    pairs = reply_of(answer.row).meta.get("input_token_logprobs")
    if pairs is None:
        raise CapabilityAbsent("the reply has no input_token_logprobs")
    expect(len(pairs) == len(ids) - start, f"{len(pairs)} of them for {len(ids) - start} tokens")
    expect([p[1] for p in pairs] == list(ids[start:]), "input_token_logprobs are of other tokens")
    values = [p[0] for p in pairs]
    expect(start > 0 or values[0] is None, f"the first token has log-prob {values[0]}")
    return [float(v) for v in values[1:]]


@check("log-probs")
async def input_log_probs_equal_reference(t: Target) -> str:
    """logprob_start_len gives the prompt's own log-probs, from the place asked for on."""
    ids = t.prompt(21, 90)
    whole = await input_logprobs(t, ids)
    want = picked(log_softmax((await t.reference.logits(ids))[:-1]), ids[1:])
    gap = float(np.abs(want - np.array(whole)).max())
    expect(gap <= t.facts.tolerance, f"difference {gap:.3f}")
    part = await input_logprobs(t, ids, 50)
    gap_part = float(np.abs(np.array(part) - np.array(whole[50:])).max())
    expect(gap_part <= t.facts.tolerance, f"from place 50 on: difference {gap_part:.3f} to the whole")
    return f"{len(whole)} values, difference at most {gap:.2g}; {len(part)} from place 50 on, {gap_part:.2g}"


@check("log-probs")
async def decoding_equals_scoring(t: Target) -> str:
    """What a response's tokens got when they were decoded is what they get as part of a prompt."""
    ids = t.prompt(22, 20)
    reply = await t.generate(ids, 24, temperature=1.0, sampling_seed=5)
    scored = await input_logprobs(t, [*ids, *reply.tokens])
    gap = float(np.abs(np.array(scored[len(ids) - 1 :]) - np.array(reply.logprobs)).max())
    expect(gap <= t.facts.tolerance, f"difference {gap:.3f} between decoding and scoring")
    return f"24 tokens, difference at most {gap:.2g}"
