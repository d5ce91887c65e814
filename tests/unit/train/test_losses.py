"""Each loss against a slow reference (float64, Python loops over tokens), and the identities between them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.train_models import make_samples
from tests.unit.train.test_grpo import flat
from turnout.train.losses.inputs import LossInputs
from turnout.train.losses.kl import kl_estimate
from turnout.train.losses.table import LOSSES
from turnout.train.losses.weights import token_weights
from turnout.train.settings import LossSettings


def case(samples, aggregate="token", seed=0, spread=0.4):
    """Per sample log-probs with gradient, and the flat inputs of one micro-batch."""
    torch.manual_seed(seed)
    new = [(-4.5 + spread * torch.randn(len(s.response_ids))).double().requires_grad_() for s in samples]
    old = [(-4.5 + spread * torch.randn(len(s.response_ids))).double() for s in samples]
    return new, old, inputs_of(samples, aggregate, old)


def inputs_of(samples, aggregate, old=None, reference=None) -> LossInputs:
    return LossInputs(
        behaviour=flat64([s.logprobs for s in samples], samples),
        advantages=flat64([s.advantages for s in samples], samples),
        weights=flat64(token_weights([s.loss_mask for s in samples], aggregate), samples),
        sample=flat([[i] * len(s.loss_mask) for i, s in enumerate(samples)], samples).long(),
        lags=flat64([s.lags for s in samples], samples),
        old=None if old is None else flat64(old, samples),
        reference=None if reference is None else flat64(reference, samples),
    )


def flat64(values, samples):
    masks = [torch.tensor(s.loss_mask) > 0 for s in samples]
    return torch.cat([torch.as_tensor(v, dtype=torch.float64)[mask] for v, mask in zip(values, masks)])


def found(new, samples, inputs, settings):
    loss, sums = LOSSES[settings.name].function(
        flat64(new, samples), torch.zeros(len(inputs.weights)), inputs, settings
    )
    return loss, torch.autograd.grad(loss, new), sums


def share(samples, index, aggregate):
    if aggregate == "token":
        return 1 / sum(sum(s.loss_mask) for s in samples)
    return 1 / (sum(any(s.loss_mask) for s in samples) * sum(samples[index].loss_mask))


def clip_value(ratio: float, advantage: float, loss: LossSettings) -> tuple[float, float]:
    """The clipped surrogate and its derivative by the log of the ratio."""
    low, high = 1 - loss.eps_clip, 1 + loss.eps_clip_high
    if advantage > 0 and ratio > high:
        return -high * advantage, 0.0
    if advantage < 0 and ratio < low:
        return -low * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def gspo_by_hand(new, old, samples, loss):
    """Loss and gradients: one ratio per response, the geometric mean of its tokens' ratios."""
    total, grads = 0.0, [[0.0] * len(s.loss_mask) for s in samples]
    for i, s in enumerate(samples):
        trained = [t for t, m in enumerate(s.loss_mask) if m]
        mean = sum(new[i][t].item() - old[i][t].item() for t in trained) / len(trained)
        for t in trained:
            value, slope = clip_value(math.exp(mean), s.advantages[t], loss)
            weight = share(samples, i, loss.aggregate)
            total += weight * value
            for other in trained:
                grads[i][other] += weight * slope / len(trained)
    return total, grads


def cispo_by_hand(new, old, samples, loss):
    total, grads = 0.0, [[0.0] * len(s.loss_mask) for s in samples]
    for i, s in enumerate(samples):
        for t, mask in enumerate(s.loss_mask):
            if mask:
                ratio = math.exp(new[i][t].item() - old[i][t].item())
                bounded = min(max(ratio, 1 - loss.eps_clip), 1 + loss.eps_clip_high)
                weight = share(samples, i, loss.aggregate) * -bounded * s.advantages[t]
                total += weight * new[i][t].item()
                grads[i][t] = weight
    return total, grads


POLICY = [name for name, loss in LOSSES.items() if loss.advantages]
BY_HAND = {"gspo": gspo_by_hand, "cispo": cispo_by_hand}


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("aggregate", ["token", "sample"])
def test_value_and_gradient_equal_the_loop(name, aggregate):
    samples = make_samples(seed=11, groups=4, members=3)
    loss = LossSettings(name, eps_clip=0.1, eps_clip_high=0.15, aggregate=aggregate)
    new, old, inputs = case(samples, aggregate)
    value, grads = BY_HAND[name](new, old, samples, loss)
    total, slopes, sums = found(new, samples, inputs, loss)
    assert float(total.detach()) == pytest.approx(value, rel=1e-6)
    for slope, wanted in zip(slopes, grads, strict=True):
        torch.testing.assert_close(slope, torch.tensor(wanted).double(), rtol=1e-5, atol=1e-8)
    assert 0 < sums.clipped < sums.tokens


@pytest.mark.parametrize("name", POLICY)
def test_at_ratio_one_the_gradient_is_that_of_reinforce(name):
    samples = make_samples(seed=3)
    new, _, inputs = case(samples, "sample")
    inputs = replace(inputs, old=None)
    _, slopes, sums = found(new, samples, inputs, LossSettings(name, aggregate="sample"))
    for index, (slope, s) in enumerate(zip(slopes, samples)):
        weight = share(samples, index, "sample")
        wanted = [-weight * a * m for a, m in zip(s.advantages, s.loss_mask)]
        torch.testing.assert_close(slope, torch.tensor(wanted).double(), rtol=1e-5, atol=1e-8)
    assert sums.clipped == 0


def test_gspo_of_one_token_responses_is_grpo():
    samples = make_samples(seed=4, longest=1)
    new, _, inputs = case(samples)
    one = found(new, samples, inputs, LossSettings("gspo", eps_clip=0.1, eps_clip_high=0.2))
    other = found(new, samples, inputs, LossSettings("grpo", eps_clip=0.1, eps_clip_high=0.2))
    assert 0 < one[2].clipped == other[2].clipped
    torch.testing.assert_close(one[0], other[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(one[1], other[1], rtol=1e-6, atol=0)


def test_cispo_keeps_the_gradient_of_a_token_outside_the_clip_and_grpo_does_not():
    (sample,) = make_samples(seed=4, groups=1, members=1, longest=1)
    sample = replace(sample, advantages=(1.0,))
    new = [torch.tensor([math.log(3.0)], dtype=torch.float64, requires_grad=True)]
    inputs = inputs_of([sample], "token", old=[[0.0]])
    settings = LossSettings("cispo", eps_clip_high=0.5)
    assert float(found(new, [sample], inputs, settings)[1][0]) == pytest.approx(-1.5)
    assert float(found(new, [sample], inputs, replace(settings, name="grpo"))[1][0]) == 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (5.0, -1.0, 3.0, 0.0),  # the dual clip
        (2.0, -1.0, 2.0, 2.0),  # between the two
        (5.0, 1.0, -1.2, 0.0),  # it leaves positive advantages alone
        (0.5, -1.0, 0.8, 0.0),
    ],
)
def test_the_dual_clip_bounds_what_a_negative_advantage_does(ratio, advantage, value, slope):
    (sample,) = make_samples(groups=1, members=1, longest=1)
    sample = replace(sample, advantages=(advantage,))
    new = [torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)]
    settings = LossSettings(eps_clip=0.2, eps_clip_high=0.2, eps_clip_c=3.0)
    loss, slopes, sums = found(new, [sample], inputs_of([sample], "token", old=[[0.0]]), settings)
    assert float(loss.detach()) == pytest.approx(value)
    assert float(slopes[0]) == pytest.approx(slope)
    assert sums.clipped == (slope == 0.0)


def test_the_entropy_is_added_to_the_objective_with_the_weights_of_the_tokens():
    samples = make_samples(seed=2)
    new, _, inputs = case(samples, "sample")
    entropy = torch.rand(len(inputs.weights)).double().requires_grad_()
    plain, _ = LOSSES["grpo"].function(flat64(new, samples), entropy, inputs, LossSettings())
    loss, _ = LOSSES["grpo"].function(flat64(new, samples), entropy, inputs, LossSettings(entropy_coef=0.3))
    (slope,) = torch.autograd.grad(loss, entropy)
    torch.testing.assert_close(slope, -0.3 * inputs.weights)
    wanted = sum(-0.3 * w * h for w, h in zip(inputs.weights.tolist(), entropy.tolist()))
    assert float((loss - plain).detach()) == pytest.approx(wanted)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_the_kl_weighted_by_the_ratio_has_its_gradient_too(kind):
    (sample,) = make_samples(groups=1, members=1, longest=1)
    sample = replace(sample, advantages=(0.0,))
    x, old, ref = -1.0, -1.4, -0.7
    new = [torch.tensor([x], dtype=torch.float64, requires_grad=True)]
    inputs = inputs_of([sample], "token", old=[[old]], reference=[[ref]])
    loss, slopes, _ = found(new, [sample], inputs, LossSettings(kl_coef=0.5, kl_kind=kind, unbiased_kl=True))

    def by_hand(at: float) -> float:
        d = at - ref
        kl = {"k1": d, "k2": d * d / 2}.get(kind, math.exp(-d) - 1 + d)
        return 0.5 * math.exp(at - old) * kl

    assert float(loss.detach()) == pytest.approx(by_hand(x))
    assert float(slopes[0]) == pytest.approx((by_hand(x + 1e-6) - by_hand(x - 1e-6)) / 2e-6, rel=1e-6)


def test_low_var_kl_is_k3_with_a_largest_value():
    far = torch.tensor([-1.0, -9.0]), torch.tensor([-1.5, -1.0])
    assert kl_estimate(*far, "low_var_kl").tolist() == pytest.approx([math.exp(-0.5) - 0.5, 10.0])


def test_a_response_that_moved_away_from_its_policy_is_left_out_where_its_advantage_is_negative():
    base = make_samples(seed=6, groups=1, members=4, longest=4)
    advantages, gaps = (-1.0, -1.0, 1.0, 1.0), (0.2, 0.05, 0.2, 0.05)  # behaviour less the policy's log-prob
    samples = [
        replace(s, advantages=(a,) * len(s.loss_mask), logprobs=tuple(-4 + g for _ in s.loss_mask))
        for s, a, g in zip(base, advantages, gaps, strict=True)
    ]
    new = [torch.full((len(s.loss_mask),), -4.0).double().requires_grad_() for s in samples]
    _, slopes, sums = found(new, samples, inputs_of(samples, "sample"), LossSettings(opsm_delta=0.1))
    assert [bool(slope.any()) for slope in slopes] == [False, True, True, True]
    assert sums.bounded == sum(samples[0].loss_mask)


@pytest.mark.parametrize("name", LOSSES)
def test_a_micro_batch_without_a_token_adds_nothing(name):
    empty = torch.zeros(0, requires_grad=True)
    inputs = LossInputs(*[torch.zeros(0)] * 3, torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    settings = LossSettings(name, opsm_delta=0.1, eps_clip_c=3.0, entropy_coef=0.1)
    loss, sums = LOSSES[name].function(empty, empty, inputs, settings)
    assert float(loss.detach()) == 0.0 and loss.requires_grad and sums.tokens == 0
