from __future__ import annotations

import math

import pytest
import torch

from tests.train_models import make_samples, reference_loss
from turnout.train.losses.grpo import grpo_loss
from turnout.train.losses.inputs import LossInputs, TokenSums
from turnout.train.losses.kl import kl_estimate
from turnout.train.losses.weights import token_weights
from turnout.train.settings import LossSettings


def flat(values, samples):
    return torch.cat(
        [
            torch.as_tensor(v, dtype=torch.float32)[torch.tensor(s.loss_mask) > 0]
            for v, s in zip(values, samples)
        ]
    )


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("aggregate", ["token", "sample"])
def test_value_and_gradient_equal_the_loop(kind, kl_coef, aggregate):
    samples = make_samples(seed=11, groups=4, members=3)
    settings = LossSettings(
        eps_clip=0.1, eps_clip_high=0.25, kl_coef=kl_coef, kl_kind=kind, aggregate=aggregate
    )
    torch.manual_seed(0)
    new = [(-4 + 0.4 * torch.randn(len(s.response_ids))).requires_grad_() for s in samples]
    old = [-4 + 0.4 * torch.randn(len(s.response_ids)) for s in samples]
    ref = [-4 + 0.4 * torch.randn(len(s.response_ids)) for s in samples]
    expected = reference_loss(new, samples, settings, old=old, reference=ref)
    wanted = torch.autograd.grad(expected, new)
    inputs = LossInputs(
        behaviour=flat([s.logprobs for s in samples], samples),
        advantages=flat([s.advantages for s in samples], samples),
        weights=flat(token_weights([s.loss_mask for s in samples], aggregate), samples),
        sample=flat([[i] * len(s.loss_mask) for i, s in enumerate(samples)], samples),
        lags=flat([s.lags for s in samples], samples),
        old=flat(old, samples),
        reference=flat(ref, samples),
    )
    found, sums = grpo_loss(flat(new, samples), torch.zeros(len(inputs.weights)), inputs, settings)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for grad, want in zip(torch.autograd.grad(found, new), wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-6)
    assert sums.tokens == sum(sum(s.loss_mask) for s in samples)
    assert 0 < sums.clipped < sums.tokens


def inputs_of(advantages, behaviour, old):
    count = len(advantages)
    return LossInputs(
        torch.tensor(behaviour),
        torch.tensor(advantages),
        torch.full((count,), 1 / count),
        torch.zeros(count, dtype=torch.int64),
        torch.zeros(count),
        torch.tensor(old),
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "bound", "clips"),
    [
        (1.5, 1.0, 1.28, True),
        (1.5, -1.0, 1.5, False),
        (0.5, -1.0, 0.8, True),
        (0.5, 1.0, 0.5, False),
        (1.1, 1.0, 1.1, False),
    ],
)
def test_the_clip_binds_only_where_it_lowers_the_objective(ratio, advantage, bound, clips):
    new = torch.tensor([math.log(ratio)], requires_grad=True)
    loss, sums = grpo_loss(new, torch.zeros(1), inputs_of([advantage], [0.0], [0.0]), LossSettings())
    assert loss.item() == pytest.approx(-bound * advantage, rel=1e-5)
    loss.backward()
    assert sums.clipped == clips
    assert (float(new.grad) == 0.0) == clips


def test_kl_kinds_by_hand():
    new, ref = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert float(kl_estimate(new, ref, "k1")) == pytest.approx(0.5)
    assert float(kl_estimate(new, ref, "k2")) == pytest.approx(0.125)
    assert float(kl_estimate(new, ref, "k3")) == pytest.approx(math.exp(-0.5) - 1 + 0.5)


def test_statistics_by_hand():
    new = torch.tensor([-1.0, -2.0])
    _, sums = grpo_loss(
        new, torch.tensor([2.0, 4.0]), inputs_of([1.0, 1.0], [-1.5, -2.0], [-1.0, -2.5]), LossSettings()
    )
    r = math.exp(0.5)
    assert sums.mean("entropy") == pytest.approx(3.0)
    assert sums.mean("ratio") == pytest.approx((1 + r) / 2)
    assert sums.mean("approx_kl") == pytest.approx((r - 1 - 0.5) / 2)
    assert sums.mean("mismatch") == pytest.approx(0.5)
    assert sums.mismatch_max == pytest.approx(0.5)
    w = [math.exp(0.5), math.exp(-0.5)]
    assert sums.mean("mismatch_k3") == pytest.approx((w[0] - 1 - 0.5 + w[1] - 1 + 0.5) / 2)
    assert sums.effective_sample_share == pytest.approx(sum(w) ** 2 / (2 * sum(x * x for x in w)))


def test_sums_add_up_and_the_maximum_stays():
    total = TokenSums(tokens=2, ratio=3, mismatch_max=0.5) + TokenSums(tokens=1, ratio=1, mismatch_max=0.2)
    assert (total.tokens, total.ratio, total.mismatch_max) == (3, 4, 0.5)
    assert TokenSums().effective_sample_share == 1.0 and TokenSums().mean("ratio") == 0.0


@pytest.mark.parametrize("aggregate", ["token", "sample"])
def test_weights_sum_to_one_and_are_zero_on_masked_tokens(aggregate):
    masks = [[1, 0, 1], [0, 0], [1]]
    weights = token_weights(masks, aggregate)
    assert sum(float(w.sum()) for w in weights) == pytest.approx(1.0)
    assert weights[0][1] == 0 and not weights[1].any()
    assert float(weights[2][0]) == pytest.approx(1 / 3 if aggregate == "token" else 1 / 2)
