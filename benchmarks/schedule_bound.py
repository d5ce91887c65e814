"""The best makespan that any schedule could have, and whether two samples of lengths have one distribution.

A trajectory is `length` seconds on a lane of an engine; all engines together have `lanes`; a train step takes
`step_s` and needs `per_step` finished trajectories; `steps` = len(lengths) / per_step. Engines may interrupt a
trajectory and go on with it at no cost, on any lane: no real schedule is better off.

`best_makespan` is exact where there is no bound on the lag, and so a lower bound where there is one, or where
trajectories come in groups. Why: shortest first is an order of training that no other beats (exchange a longer
trajectory that is trained earlier with a shorter one that is trained later: the shorter one takes of the longer
one's time what they have at once, then as much as it needs; the longer one gets the rest and the shorter one's).
To end at X, step i of M has to start by d_i = X - (M - i) step_s. Trajectories with deadlines and no release
times fit on m lanes, with interruptions, if and only if each fits before its deadline and, for each deadline D,
what must be done by D is at most m D: of trajectory j max(0, length_j - max(0, d_j - D)) (min cut of the flow of
Horn, Naval Res. Logist. 21, 1974; the earliest D are the tightest set of times of that size, since all are there
from 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.floating[Any]]
PERMUTATIONS = 2000


@dataclass(frozen=True)
class Shop:
    """See the module. `max_lag` None: no bound; a trajectory's lag is the steps done when it trains less those done
    when it began."""

    lanes: int
    per_step: int
    step_s: float
    max_lag: int | None = None


def best_makespan(lengths: Sequence[float], shop: Shop) -> float:
    """Seconds to the end of the last train step, at best; at least the largest of: work / lanes and the longest
    trajectory, each with a step after it, and the shortest trajectories with all steps after them."""
    sorted_N = np.sort(np.asarray(lengths, dtype=np.float64))
    steps = len(sorted_N) // shop.per_step
    after_N = (
        steps - np.arange(len(sorted_N)) // shop.per_step
    ) * shop.step_s  # from the deadline to the end
    low, high = 0.0, float(sorted_N.sum() + steps * shop.step_s)
    while high - low > 1e-9 * max(1.0, high):
        middle = (low + high) / 2
        if _fits(sorted_N, middle - after_N, shop.lanes):
            high = middle
        else:
            low = middle
    return high


def _fits(lengths_N: Floats, deadlines_N: Floats, lanes: int) -> bool:
    slack = 1e-12 * max(1.0, float(deadlines_N[-1]))
    if (lengths_N > deadlines_N + slack).any():
        return False
    for by in np.unique(deadlines_N):
        due_N = np.maximum(0.0, lengths_N - np.maximum(0.0, deadlines_N - by))
        if due_N.sum() > lanes * by + slack:
            return False
    return True


# A trajectory in the search: (time left, steps done when it began, or -1).
Left = tuple[int, int]
World = tuple[
    int, int, tuple[Left, ...]
]  # (steps done, time left of the step that runs, what is not trained)


def brute_force(lengths: Sequence[int], shop: Shop) -> int:
    """The best makespan by trying everything, tick by tick, under the bound on the lag. Whole numbers only."""
    step_ticks = int(shop.step_s)
    worlds: set[World] = {(0, 0, tuple(sorted((length, -1) for length in lengths)))}
    tick = 0
    while not any(not left and not running for _, running, left in worlds):
        started = {after for world in worlds for after in _step_starts(world, shop, step_ticks)}
        worlds = {after for world in started for after in _ticked(world, shop)}
        tick += 1
    return tick


def _step_starts(world: World, shop: Shop, step_ticks: int) -> list[World]:
    steps, running, left = world
    found = [world]
    if running == 0:
        for batch in set(combinations([one for one in left if one[0] == 0], shop.per_step)):
            if shop.max_lag is None or all(steps - began <= shop.max_lag for _, began in batch):
                rest = list(left)
                for one in batch:
                    rest.remove(one)
                found.append((steps, step_ticks, tuple(rest)))
    return found


def _ticked(world: World, shop: Shop) -> set[World]:
    """After a tick, in which any unfinished trajectories have run, as many as there are lanes (fewer only where a
    late beginning may be better: under a bound on the lag)."""
    steps, running, left = world
    unfinished = [at for at, (time, _) in enumerate(left) if time]
    most = min(shop.lanes, len(unfinished))
    after: set[World] = set()
    for count in range(most if shop.max_lag is None else 0, most + 1):
        for chosen in combinations(unfinished, count):
            moved = list(left)
            for at in chosen:
                time, began = left[at]
                moved[at] = (time - 1, steps if began < 0 else began)
            after.add((steps + (running == 1), max(0, running - 1), tuple(sorted(moved))))
    return after


def same_distribution(first: ArrayLike, second: ArrayLike, seed: int) -> float:
    """p-value of the Anderson-Darling statistic of two samples (Pettitt, Biometrika 63, 1976) over random
    exchanges of their labels; it weighs both tails, where a bias by length shows."""
    one, other = np.asarray(first, np.float64), np.asarray(second, np.float64)
    pooled = np.concatenate([one, other])
    labels = np.concatenate([np.ones(len(one), np.int64), np.zeros(len(other), np.int64)])
    order = np.argsort(pooled, kind="stable")
    pooled, labels = pooled[order], labels[order]
    last_of_ties = np.flatnonzero(np.append(np.diff(pooled) > 0, True))[:-1]
    if len(last_of_ties) == 0:
        return 1.0
    found = _anderson(labels, last_of_ties)
    rng = np.random.default_rng(seed)
    larger = sum(_anderson(rng.permutation(labels), last_of_ties) >= found for _ in range(PERMUTATIONS))
    return (1 + larger) / (1 + PERMUTATIONS)


def _anderson(labels: NDArray[np.int64], last_of_ties: NDArray[np.int64]) -> float:
    total, ours = len(labels), int(labels.sum())
    upto = last_of_ties + 1
    counted = np.cumsum(labels)[last_of_ties]
    weights = np.diff(np.append(upto, total))
    terms = (counted * total - ours * upto) ** 2 / (upto * (total - upto))
    return float((weights * terms).sum()) / (ours * (total - ours))
