"""Generalised advantage estimation over the tokens that train (Schulman et al. 2016, arXiv 1506.02438).

With r_t the reward of token t, V_t the value of the state before it and V of the end 0:
    delta_t = r_t + gamma V_{t+1} - V_t
    A_t     = delta_t + gamma lambd A_{t+1}
    R_t     = A_t + V_t, which the critic learns
A masked token (a tool's answer, a token over the lag bound) is no action: the tokens around it follow one another.
float64, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]


def terminal_rewards(reward: float, mask: Sequence[int]) -> Doubles:
    """[T] rewards of a response's tokens: `reward` at its last trained one, 0 elsewhere."""
    rewards = np.zeros(len(mask))
    trained = np.flatnonzero(mask)
    if len(trained):
        rewards[trained[-1]] = reward
    return rewards


def gae(rewards_T: Doubles, values_T: Doubles, gamma: float, lambd: float) -> tuple[Doubles, Doubles]:
    """Advantages and returns of the tokens of one response, in order, masked ones left out."""
    advantages_T = np.zeros(len(values_T))
    value = advantage = 0.0
    for t in range(len(values_T) - 1, -1, -1):
        delta = rewards_T[t] + gamma * value - values_T[t]
        advantage = delta + gamma * lambd * advantage
        advantages_T[t], value = advantage, values_T[t]
    return advantages_T, advantages_T + values_T
