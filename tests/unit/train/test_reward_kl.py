"""The KL in the reward: costs by hand, and a train step that is one with the advantages that follow."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.train_models import batch_of, gradients, make_model, make_samples, settings_for
from turnout.core.types import TrainSample
from turnout.train.advantages import with_advantages
from turnout.train.local import LocalBackend
from turnout.train.reward_kl import reward_costs
from turnout.train.settings import AdvantageSettings

MEAN = AdvantageSettings(std=False, kl_coef=0.5)
RETURNS = AdvantageSettings("none", std=False, normalize=True, kl_coef=0.5)


def rewarded(seed: int = 3) -> list[TrainSample]:
    """Groups with an empty member and a masked one, and rewards."""
    samples = list(make_samples(seed=seed))
    nothing: dict[str, tuple[float, ...]] = dict.fromkeys(("logprobs", "advantages", "lags"), ())
    samples[1] = replace(samples[1], response_ids=(), loss_mask=(), **nothing)
    samples[5] = replace(samples[5], loss_mask=(0,) * len(samples[5].loss_mask))
    return [replace(s, reward=math.cos(index)) for index, s in enumerate(samples)]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_costs_by_hand(kind):
    sample = TrainSample("g", (1,), (2, 3), (0.0, 0.0), (1, 0), (0.0, 0.0), reference=(-1.5, -9.0))
    (costs,) = reward_costs([sample], [np.array([-1.0, -2.0], np.float32)], 0.25, kind)
    d = 0.5
    kl = {"k1": d, "k2": d * d / 2}.get(kind, math.exp(-d) - 1 + d)
    assert costs.tolist() == pytest.approx([0.25 * kl, 0.0])


@pytest.mark.parametrize("how", [MEAN, RETURNS], ids=["mean", "returns"])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_a_step_is_the_one_with_advantages_of_rewards_less_the_kl(tmp_path, how, given, several):
    folder, other = make_model(tmp_path / "a"), make_model(tmp_path / "b", seed=1)
    samples = rewarded()
    base = settings_for(folder, kl_kind="k1", max_tokens_per_micro_batch=40)
    base = replace(base, samples_per_optimizer_step=4 if several else None)
    policy = LocalBackend(base).logprobs(samples)
    scored = LocalBackend(settings_for(other)).logprobs(samples)
    kl = [
        0.5 * (mine.astype(float) - theirs) * np.asarray(s.loss_mask)
        for s, mine, theirs in zip(samples, policy, scored)
    ]
    wanted_samples = with_advantages(samples, replace(how, kl_coef=0.0), kl)
    assert any(a.advantages != b.advantages for a, b in zip(wanted_samples, with_advantages(samples, how)))
    if given:
        samples = [replace(s, reference=tuple(r.tolist())) for s, r in zip(samples, scored)]
    settings = replace(base, advantage=how, reference=None if given else other, reference_given=given)
    loss, found = gradients(LocalBackend(settings), samples)
    wanted_loss, wanted = gradients(LocalBackend(base), wanted_samples)
    assert loss == pytest.approx(wanted_loss, rel=1e-4)
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-3, atol=1e-5)
    report = LocalBackend(settings).train(batch_of(samples))
    assert report.reference_kl != 0.0 and report.optimizer_steps == 1 + several


def test_a_reference_equal_to_the_policy_changes_nothing(tmp_path):
    folder, samples = make_model(tmp_path), rewarded()
    settings = replace(settings_for(folder, kl_kind="k1"), advantage=MEAN, reference=folder)
    _, found = gradients(LocalBackend(settings), samples)
    plain = with_advantages(samples, MEAN)
    _, wanted = gradients(LocalBackend(settings_for(folder)), plain)
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)


def test_it_needs_a_reference(tmp_path):
    (fault,) = replace(settings_for(tmp_path), advantage=MEAN).faults()
    assert fault.where == "--kl-coef"
