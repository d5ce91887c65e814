"""The plots are real pictures of the rows, and what has no numbers is left out."""

from __future__ import annotations

import sys

import pytest

from turnout.observe.metrics import (
    BUBBLE_S,
    EVAL_HIGH,
    EVAL_LOW,
    EVAL_SCORE,
    LAG,
    LAG_MAX,
    LENGTHS,
    MISMATCH,
    RESPONSE_LEN,
    REWARD,
    STEP_S,
)
from turnout.observe.plots import _smooth, write_plots


def rows(count: int):
    made: list = [(0, {EVAL_SCORE: 0.0, EVAL_LOW: 0.0, EVAL_HIGH: 0.2})]
    for step in range(1, count + 1):
        row = {
            REWARD: step / count,
            RESPONSE_LEN: 9.0,
            MISMATCH: 0.01,
            "seconds/rollout": 1.0,
            "seconds/train": 2.0,
            LAG: 0.5,
            LAG_MAX: 2.0,
            LENGTHS[0]: 3.0,
            LENGTHS[2]: 16.0,
            BUBBLE_S: 1.0,
            STEP_S: 3.0,
        }
        made.append((step, row))
    made[-1][1][REWARD] = None
    return made


def ink(path) -> int:
    """Pixels that are not white."""
    from matplotlib.image import imread

    image = imread(path)
    assert image.shape[0] > 200 and image.shape[1] > 300
    return int((image[..., :3].min(axis=-1) < 0.9).sum())


def test_every_curve_has_a_file_and_all_are_in_one(tmp_path):
    before = "matplotlib.pyplot" in sys.modules  # a test that ran earlier in this process may have loaded it
    paths = write_plots(rows(6), tmp_path / "plots", "quick")
    assert [path.name for path in paths] == [
        "plots.png",
        "reward.png",
        "length.png",
        "lag.png",
        "phases.png",
        "bubble.png",
        "mismatch.png",
    ]
    assert all(ink(path) > 1000 for path in paths)
    assert before or "matplotlib.pyplot" not in sys.modules, "its global state is not ours to touch"


def test_one_step_is_enough(tmp_path):
    assert len(write_plots(rows(1), tmp_path, "x")) == 7


def test_curves_without_numbers_are_left_out(tmp_path):
    only = [(1, {REWARD: 0.5, MISMATCH: None})]
    assert [path.name for path in write_plots(only, tmp_path, "x")] == ["plots.png", "reward.png"]
    assert write_plots([(1, {"other": 1.0})], tmp_path / "none", "x") == []
    assert not (tmp_path / "none").exists()


def test_smoothing_is_the_mean_of_what_came_before():
    assert _smooth([1.0, 3.0, 5.0], 2) == pytest.approx([1.0, 2.0, 4.0])
