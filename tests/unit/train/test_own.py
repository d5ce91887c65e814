"""Functions of the user's own: they take their places, and what is wrong with them names the option."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.train_models import batch_of, make_model, make_samples, settings_for
from turnout.core.errors import ConfigError, TrainError
from turnout.train.advantages import with_advantages
from turnout.train.local import LocalBackend
from turnout.train.losses.inputs import LossInputs
from turnout.train.losses.table import loss_of
from turnout.train.settings import AdvantageSettings, LossSettings

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_algorithm.py"
FUNCTIONS = """
def fine(samples):
    return [[s.reward] * len(s.response_ids) for s in samples]

def broken(samples):
    raise KeyError("no")

def few(samples):
    return [0.0]

def wild(samples):
    return [float("nan")] * len(samples)

def plain(terms, settings):
    return -terms.ratio * terms.advantages

def constant(terms, settings):
    return terms.advantages.abs().max() + 0 * terms.logprobs.detach()

def one(terms, settings):
    return terms.logprobs.sum()
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(FUNCTIONS)
    return f"{tmp_path / 'own.py'}:"


def rewarded():
    return [replace(s, reward=float(i % 4)) for i, s in enumerate(make_samples(seed=2))]


def test_the_example_is_the_reward_less_the_best_of_the_others():
    found = with_advantages(rewarded()[:3], AdvantageSettings(function=f"{EXAMPLE}:against_the_best"))
    assert [s.advantages[0] for s in found] == [0 - 2.0, 1 - 2.0, 2 - 1.0]


def test_advantages_of_ones_own_may_be_of_tokens_and_are_normalised(own):
    plain = with_advantages(rewarded(), AdvantageSettings("none", normalize=True))
    found = with_advantages(rewarded(), AdvantageSettings(normalize=True, function=own + "fine"))
    assert [s.advantages for s in found] == [s.advantages for s in plain]


@pytest.mark.parametrize(
    ("name", "said"), [("broken", "KeyError: 'no'"), ("few", "1 advantages for 9"), ("wild", "group g0")]
)
def test_what_is_wrong_with_advantages_names_the_option(own, name, said):
    with pytest.raises(TrainError, match="--custom-advantage-function-path") as caught:
        with_advantages(rewarded(), AdvantageSettings(function=own + name))
    assert said in str(caught.value)


def test_a_loss_of_ones_own_takes_the_surrogates_place(tmp_path, own):
    folder, samples = make_model(tmp_path / "model"), make_samples(seed=2)
    free = settings_for(folder, eps_clip=1.0, eps_clip_high=1e9)  # GRPO without a bound
    backends = [LocalBackend(s) for s in (free, settings_for(folder, function=own + "plain"))]
    for backend in backends:
        assert backend.train(batch_of(samples)).clip_fraction == 0
    torch.testing.assert_close(*(backend._flat.master for backend in backends))
    LocalBackend(settings_for(folder, function=f"{EXAMPLE}:reinforce")).train(batch_of(samples))


def test_what_is_wrong_with_a_loss_names_the_option(tmp_path, own):
    folder = make_model(tmp_path / "model")
    with pytest.raises(TrainError, match="not a loss for each of"):
        LocalBackend(settings_for(folder, function=own + "one")).train(batch_of(make_samples()))
    with pytest.raises(ConfigError, match="--custom-loss-function-path"):
        LocalBackend(settings_for(folder, function=own + "none"))


@pytest.mark.parametrize("tokens", [0, 3])
def test_no_rank_leaves_out_its_backward_pass(own, tokens):
    """One without a sample of its own, or whose loss has no gradient: the others would wait for it."""
    logprobs = torch.full((tokens,), -1.0, requires_grad=True)
    flat = torch.zeros(tokens)
    inputs = LossInputs(flat - 1, flat + 1, flat + 1, flat.long(), flat)
    settings = LossSettings(function=own + "constant")
    loss, sums = loss_of(settings).function(logprobs, flat, inputs, settings)
    loss.backward()
    assert (float(loss.detach()), sums.tokens) == (tokens, tokens)
    assert torch.equal(logprobs.grad, flat)
