"""The sampler against a dumb reference, its noise, and its independence of the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from turnout.engine.sampler import SELECTED, Draw, sample, score, uniforms
from turnout.protocol.sglang import SamplingParams

VOCABULARY = 1000


def dumb(logits: list[float], draw: Draw) -> tuple[int, float]:
    """One row, plain Python floats, no cleverness."""
    params = draw.params
    scaled = [x / (params.temperature or 1.0) for x in logits]
    top = max(scaled)
    total = math.fsum(math.exp(x - top) for x in scaled)
    logprob = lambda i: scaled[i] - top - math.log(total)  # noqa: E731
    allowed = [i for i in range(len(logits)) if i not in draw.banned]
    if params.temperature == 0:
        best = max(allowed, key=lambda i: (logits[i], -i))
        return best, logprob(best)
    left = math.fsum(math.exp(scaled[i] - top) for i in allowed)
    probs = [math.exp(x - top) / left if i not in draw.banned else 0.0 for i, x in enumerate(scaled)]
    ranked = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    kept, before = [], 0.0
    for rank, i in enumerate(ranked):
        inside_k = params.top_k == -1 or rank < params.top_k
        if inside_k and before <= params.top_p and probs[i] >= params.min_p * probs[ranked[0]]:
            kept.append(i)
        before += probs[i]
    weights = [probs[i] if i in set(kept) else 0.0 for i in range(len(probs))]
    target, running = float(uniforms([draw.seed], [draw.position])[0]) * math.fsum(weights), 0.0
    for i, weight in enumerate(weights):
        running += weight
        if running > target:
            return i, logprob(i)
    raise AssertionError("the noise is below 1")


SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 2.0, "top_k": 5},
    {"top_p": 0.5},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 50, "top_p": 0.7, "min_p": 0.01},
    {"top_k": 1},
]


@pytest.mark.parametrize("row", SETTINGS)
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 256, 17])
def test_agrees_with_the_reference(row, vocabulary):
    torch.manual_seed(1)
    params = SamplingParams(**row)
    logits = torch.randn(24, vocabulary) * 3
    banned = [(), (3, 7), tuple(int(i) for i in logits[2].topk(3).indices)]
    draws = [Draw(params, 1000 + i, 5 * i, banned[i % 3]) for i in range(24)]
    got = sample(logits, draws)
    for i, draw in enumerate(draws):
        token, logprob = dumb(logits[i].double().tolist(), draw)
        assert got.tokens[i] == token
        assert got.logprobs[i] == pytest.approx(logprob, abs=2e-6)


def test_logprob_is_over_the_whole_vocabulary():
    logits = torch.randn(4, VOCABULARY)
    draws = [Draw(SamplingParams(temperature=0.7, top_k=2, top_p=0.3), i, i, (1,)) for i in range(4)]
    got = sample(logits, draws)
    want = torch.log_softmax(logits.double() / 0.7, -1)[range(4), got.tokens]
    assert torch.allclose(torch.tensor(got.logprobs).double(), want, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_does_not_depend_on_the_others(dtype, threads):
    torch.manual_seed(2)
    logits = (torch.randn(64, 5003) * 4).to(dtype)
    draws = [Draw(SamplingParams(**SETTINGS[i % len(SETTINGS)]), 7 * i, i) for i in range(64)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = sample(logits, draws)
        torch.set_num_threads(1)
        alone = [sample(logits[i : i + 1], draws[i : i + 1]) for i in range(64)]
        mirrored = sample(logits.flip(0), draws[::-1])
    finally:
        torch.set_num_threads(before)
    assert together.tokens == [a.tokens[0] for a in alone] == mirrored.tokens[::-1]
    assert together.logprobs == [a.logprobs[0] for a in alone] == mirrored.logprobs[::-1]


@pytest.mark.parametrize(
    "row", [{"top_p": 0.9}, {"top_k": 900}, {"min_p": 0.001}, {"top_k": 700, "top_p": 0.99}]
)
def test_a_nucleus_wider_than_the_first_look_is_exact(row):
    torch.manual_seed(3)
    logits = torch.cat([torch.randn(6, 4 * SELECTED) * scale for scale in (0.3, 1.0, 4.0)])
    draws = [Draw(SamplingParams(**row), i, 7 * i) for i in range(18)]
    got = sample(logits, draws)
    assert got.tokens == [dumb(logits[i].double().tolist(), draw)[0] for i, draw in enumerate(draws)]


@pytest.mark.parametrize("kept", [3, 600])
def test_of_equal_weights_at_the_edge_the_lowest_ids_stay(kept):
    logits = torch.zeros(400, 2 * SELECTED)
    logits[:, 5] = 2.0
    got = sample(logits, [Draw(SamplingParams(top_k=kept), i, i) for i in range(400)])
    assert max(got.tokens) < max(kept, 6) and len(set(got.tokens)) > min(kept, 50) - 1


def test_a_score_is_the_log_prob_of_a_draw_at_temperature_1():
    torch.manual_seed(4)
    logits = torch.randn(70, VOCABULARY) * 3
    for row in ({}, {"top_k": 5}):
        got = sample(logits, [Draw(SamplingParams(**row), i, i) for i in range(70)])
        assert score(logits, np.array(got.tokens)) == pytest.approx(got.logprobs, abs=1e-6)


def test_greedy_takes_the_lowest_id_among_equals_and_never_a_banned_one():
    logits = torch.zeros(3, VOCABULARY)
    logits[1, [9, 4, 700]] = 1.0
    logits[2, 5] = 3.0
    greedy = SamplingParams(temperature=0.0)
    got = sample(logits, [Draw(greedy, 0, 0), Draw(greedy, 0, 0), Draw(greedy, 0, 0, (5, 0))])
    assert got.tokens == [0, 4, 1]


def test_greedy_tells_logits_apart_whose_weights_round_to_the_same():
    logits = torch.full((1, 8), -1.0)
    logits[0, 2], logits[0, 6] = 1e-9, 2e-9
    assert sample(logits, [Draw(SamplingParams(temperature=0.0), 0, 0)]).tokens == [6]


def test_uniform_is_uniform_over_seeds_and_over_positions():
    n, bins = 1 << 16, 64
    for seeds, positions in (
        (range(n), [9] * n),
        ([9] * n, range(n)),
        ([2**63 - 1 - i for i in range(n)], [0] * n),
    ):
        u = uniforms(list(seeds), list(positions))
        assert u.min() >= 0.0 and u.max() < 1.0
        counts = np.histogram(u, bins, (0, 1))[0]
        chi2 = float(((counts - n / bins) ** 2 / (n / bins)).sum())
        assert 25 < chi2 < 120  # 63 degrees of freedom: outside with probability below 1e-5
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02


def test_noise_is_a_function_of_seed_and_position():
    assert uniforms([5, 6, 5], [1, 1, 2]).tolist() == [
        float(uniforms([s], [p])[0]) for s, p in ((5, 1), (6, 1), (5, 2))
    ]
    assert len(set(uniforms([5, 6, 5, 6, -1], [1, 1, 2, 2, 1]).tolist())) == 5


def test_sampled_frequencies_follow_the_distribution():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]])).expand(20000, -1)
    got = sample(logits, [Draw(SamplingParams(), 3, i) for i in range(20000)])
    counts = np.bincount(got.tokens, minlength=4)
    expected = np.array([0.5, 0.25, 0.125, 0.125]) * 20000
    assert float(((counts - expected) ** 2 / expected).sum()) < 21  # 3 degrees of freedom, p below 1e-4


def test_non_finite_logits_show_in_the_logprob():
    logits = torch.zeros(1, 300)
    logits[0, 5] = float("nan")
    assert not math.isfinite(sample(logits, [Draw(SamplingParams(), 0, 0)]).logprobs[0])
