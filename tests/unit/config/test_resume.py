"""What may differ between a run and its continuation, and how the rest is told."""

from __future__ import annotations

import json

import pytest

from turnout.config import load
from turnout.config.load import dump
from turnout.config.resume import MAY_DIFFER, MAY_GROW, differences, grows
from turnout.config.run_config import specs


def then(write, *words):
    return json.loads(dump(load(write(), list(words))))


def told(write, before, *words):
    return [fault.line() for fault in differences(before, load(write(), list(words)))]


def test_the_same_configuration_goes_on(write):
    assert told(write, then(write)) == []


def test_only_options_that_exist_may_differ():
    assert set(MAY_GROW) | MAY_DIFFER <= set(specs())


@pytest.mark.parametrize(
    "words",
    [
        ("--rollout-num-engines", "3"),
        ("--rollout-num-gpus-per-engine", "2"),
        ("--engine-threads", "2", "--trainer-threads", "2"),
        ("--update-weight-timeout-s", "9"),
        ("--save-interval", "4"),
        ("--panel", "off", "--no-plots"),
        ("--on-resume", "drop"),
        ("--num-rollout", "11"),
    ],
)
def test_numbers_of_engines_deadlines_seeing_and_a_later_end_may_differ(write, words):
    assert told(write, then(write), *words) == []


def test_everything_that_differs_is_named_in_one_message_with_both_values(write):
    lines = told(write, then(write), "--seed", "8", "--lr", "1e-5", "--schedule", "async")
    assert len(lines) == 3
    assert any(line.startswith("--seed = 8: the run in --run-dir has 1234") for line in lines)
    assert all("give the same, or another --run-dir" in line for line in lines)


def test_an_option_that_is_newer_than_the_run_counts_as_its_default(write):
    before = then(write)
    del before["seed"]
    assert told(write, before) == []
    assert len(told(write, before, "--seed", "8")) == 1


def test_the_end_may_only_move_back_and_not_where_the_learning_rate_decays_over_it(write):
    assert "it can only grow" in told(write, then(write), "--num-rollout", "9")[0]
    decays = ("--lr-decay-style", "linear")
    assert "decays over that" in told(write, then(write, *decays), *decays, "--num-rollout", "11")[0]
    assert grows(then(write), load(write(), ["--num-rollout", "11"]))
    assert not grows(then(write), load(write(), ["--seed", "8"]))
