"""GAE against sums written out, and what it becomes at the ends of lambda."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnout.train.gae import gae, terminal_rewards

TOKENS = st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=12)
SHARE = st.floats(0, 1)


def by_sums(rewards, values, gamma, lambd):
    """A_t = sum over l of (gamma lambd)^l delta_{t+l}, by the definition: no recursion."""
    follows = [*values[1:], 0.0]
    deltas = [r + gamma * f - v for r, f, v in zip(rewards, follows, values)]
    count = len(values)
    return [sum((gamma * lambd) ** j * deltas[t + j] for j in range(count - t)) for t in range(count)]


@given(TOKENS, SHARE, SHARE)
def test_it_is_the_sum_of_discounted_errors(tokens, gamma, lambd):
    rewards, values = (np.array(column) for column in zip(*tokens))
    advantages, returns = gae(rewards, values, gamma, lambd)
    np.testing.assert_allclose(advantages, by_sums(rewards, values, gamma, lambd), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(returns, advantages + values, rtol=0, atol=1e-12)


@given(TOKENS, SHARE)
def test_lambda_1_is_the_discounted_reward_less_the_value(tokens, gamma):
    rewards, values = (np.array(column) for column in zip(*tokens))
    advantages, _ = gae(rewards, values, gamma, 1.0)
    left = [sum(gamma**j * r for j, r in enumerate(rewards[t:])) for t in range(len(rewards))]
    np.testing.assert_allclose(advantages, np.array(left) - values, rtol=1e-9, atol=1e-9)


@given(TOKENS, SHARE)
def test_lambda_0_is_the_error_of_one_step(tokens, gamma):
    rewards, values = (np.array(column) for column in zip(*tokens))
    advantages, _ = gae(rewards, values, gamma, 0.0)
    np.testing.assert_allclose(advantages, rewards + gamma * np.append(values[1:], 0) - values, atol=1e-12)


@pytest.mark.parametrize(
    ("mask", "place"), [([1, 1, 1], 2), ([1, 0, 1, 0], 2), ([0, 1, 0, 0], 1), ([0, 0], None), ([], None)]
)
def test_the_reward_is_at_the_last_token_that_trains(mask, place):
    rewards = terminal_rewards(-2.5, mask)
    assert rewards.tolist() == [-2.5 if t == place else 0.0 for t in range(len(mask))]
