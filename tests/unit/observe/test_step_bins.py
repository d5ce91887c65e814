"""Numbers by step: bounded, exact when bins are joined, and only what changed is given again."""

from __future__ import annotations

from turnout.observe.step_bins import StepBins, length_bucket


def test_bins_are_joined_and_keep_sums_and_counts() -> None:
    bins = StepBins(limit=4)
    for step in range(16):
        bin_ = bins.at(step, revision=step)
        bin_.add("reward", float(step))
        bin_.lags[step % 2] += 10
    assert bins.width == 4 and bins.epoch == 2
    assert [row["reward"] for row in bins.means(("reward",), -1)] == [1.5, 5.5, 9.5, 13.5]
    assert [row["lags"] for row in bins.shapes(-1)] == [[(0, 20), (1, 20)]] * 4


def test_only_bins_that_changed_are_given() -> None:
    bins = StepBins()
    for step in range(3):
        bins.at(step, revision=1).add("x", 1.0)
    bins.at(1, revision=2).add("x", 3.0)
    assert [(row["step"], row["x"]) for row in bins.means(("x", "absent"), 1)] == [(1, 2.0)]


def test_buckets_of_lengths_begin_where_they_say() -> None:
    assert length_bucket(0) == 0 and length_bucket(1) == 1
    for tokens in (1, 2, 3, 4, 15, 16, 17, 1000, 1024, 32768):
        bucket = length_bucket(tokens)
        assert 2 ** ((bucket - 1) / 4) <= tokens * (1 + 1e-9) and tokens < 2 ** (bucket / 4) * (1 + 1e-9)
