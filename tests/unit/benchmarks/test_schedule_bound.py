"""The bound that schedules are measured against, by brute force; the test of lengths, by biases it must find."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.schedule_bound import Shop, best_makespan, brute_force, same_distribution


def case(rng: random.Random, most: int = 6, longest: int = 5) -> tuple[list[int], Shop]:
    per_step = rng.choice([1, 1, 2, 3])
    count = per_step * rng.randint(1, most // per_step)
    lengths = [min(longest, rng.choice([1, 1, 2, 3, 5])) for _ in range(count)]
    return lengths, Shop(rng.randint(1, 3), per_step, rng.randint(1, 3))


def rounded_up(lengths: list[int], shop: Shop) -> int:
    """Time moves in whole ticks in the search; with whole lengths that costs nothing more."""
    return math.ceil(best_makespan(lengths, shop) - 1e-6)


def test_the_bound_is_the_best_makespan() -> None:
    rng = random.Random(1)
    for _ in range(200):
        lengths, shop = case(rng)
        assert rounded_up(lengths, shop) == brute_force(lengths, shop), (lengths, shop)


def test_a_bound_on_the_lag_only_makes_it_longer() -> None:
    rng = random.Random(2)
    longer = 0
    for _ in range(60):
        lengths, shop = case(rng, most=4, longest=3)
        last = len(lengths) // shop.per_step - 1
        assert brute_force(lengths, replace(shop, max_lag=last)) == rounded_up(lengths, shop)
        bounded = brute_force(lengths, replace(shop, max_lag=0))
        assert bounded >= rounded_up(lengths, shop), (lengths, shop)
        longer += bounded > rounded_up(lengths, shop)
    assert longer > 10


def test_the_bound_is_no_less_than_its_three_parts() -> None:
    rng = random.Random(3)
    for _ in range(50):
        lengths, shop = case(rng)
        steps = len(lengths) // shop.per_step
        parts = (sum(lengths) / shop.lanes + shop.step_s, steps * shop.step_s, max(lengths) + shop.step_s)
        assert best_makespan(lengths, shop) >= max(parts) - 1e-6


def test_samples_of_one_distribution_pass() -> None:
    passed = 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        first, second = rng.lognormal(0, 1, 500), rng.lognormal(0, 1, 500)
        passed += same_distribution(first, second, seed) > 0.05
    assert 8 <= passed <= 10


@pytest.mark.parametrize("share", [0.06, 0.3])
def test_the_longest_left_out_is_found(share: float) -> None:
    rng = np.random.default_rng(7)
    first = np.sort(rng.lognormal(0, 1, 2000))[: int(2000 * (1 - share))]
    assert same_distribution(first, rng.lognormal(0, 1, 2000), 7) < 0.01


def test_lengths_that_are_whole_numbers_with_many_ties() -> None:
    rng = np.random.default_rng(8)
    first, second = rng.integers(1, 5, 800), rng.integers(1, 5, 800)
    assert same_distribution(first, second, 8) > 0.01
    assert same_distribution(first, np.minimum(second, 3), 8) < 0.01
    assert same_distribution([2, 2], [2, 2], 8) == 1.0
