"""Off-policy corrections against the slow reference: values, gradients, statistics, and what ends a run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.train_models import (
    batch_of,
    gradients,
    make_model,
    make_samples,
    reference_logprobs,
    reference_loss,
    reference_model,
    reference_weights,
    settings_for,
)  # fmt: skip
from tests.unit.train.test_grpo import flat
from turnout.core.errors import TrainError
from turnout.train.local import LocalBackend
from turnout.train.losses.grpo import grpo_loss
from turnout.train.losses.inputs import LossInputs
from turnout.train.losses.weights import token_weights
from turnout.train.off_policy import importance
from turnout.train.settings import LossSettings, OffPolicy

CORRECTIONS = [
    OffPolicy("none"),
    OffPolicy("none", rollout_logprobs=True),
    OffPolicy("tis", cap=1.3),
    OffPolicy("tis", low=0.8, cap=1.3),
    OffPolicy("mis", low=0.7, cap=1.4),
    OffPolicy("sequence", cap=1.5),
    OffPolicy("sequence", low=0.5),
    OffPolicy("decoupled", cap=1.4),
    OffPolicy("decoupled", cap=1.4, prox="interpolate"),
]
names = [f"{c.kind}-{c.low}-{c.cap}-{c.prox}-{c.rollout_logprobs}" for c in CORRECTIONS]


@pytest.mark.parametrize("off", CORRECTIONS, ids=names)
@pytest.mark.parametrize("aggregate", ["token", "sample"])
def test_value_and_gradient_equal_the_loop(off, aggregate):
    samples = make_samples(seed=5, groups=4, members=3)
    settings = LossSettings(eps_clip=0.1, eps_clip_high=0.25, aggregate=aggregate, off_policy=off)
    torch.manual_seed(1)
    new = [(-4.5 + 0.4 * torch.randn(len(s.response_ids))).requires_grad_() for s in samples]
    old = [-4.5 + 0.4 * torch.randn(len(s.response_ids)) for s in samples]
    expected = reference_loss(new, samples, settings, old=old)
    wanted = torch.autograd.grad(expected, new)
    inputs = LossInputs(
        behaviour=flat([s.logprobs for s in samples], samples),
        advantages=flat([s.advantages for s in samples], samples),
        weights=flat(token_weights([s.loss_mask for s in samples], aggregate), samples),
        sample=flat([[i] * len(s.loss_mask) for i, s in enumerate(samples)], samples).long(),
        lags=flat([s.lags for s in samples], samples),
        old=flat(old, samples),
    )
    found, _ = grpo_loss(flat(new, samples), torch.zeros(len(inputs.weights)), inputs, settings)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for grad, want in zip(torch.autograd.grad(found, new), wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-6)


def first_gradients(backend: LocalBackend, samples) -> dict[str, torch.Tensor]:
    """By parameter, of the first optimizer step of a train step."""
    caught: list[dict[str, torch.Tensor]] = []
    flat, step = backend._flat, backend._optimizer.step

    def caught_step(lr: float, norm: float) -> None:
        caught.append({n: v.clone() for n, v in zip(flat.names, flat.views(flat.grad))})
        step(lr, norm)

    backend._optimizer.step = caught_step  # type: ignore[method-assign]
    backend.train(batch_of(samples))
    return caught[0]


@pytest.mark.parametrize("off", CORRECTIONS, ids=names)
@pytest.mark.parametrize("inner", [None, 4])
def test_the_trainer_has_the_gradient_of_the_loop_however_it_packs(tmp_path, off, inner):
    """The first optimizer step of one or two; the second is not compared, its weights have moved."""
    folder, samples = make_model(tmp_path), make_samples(seed=6, groups=2, members=4)
    loss = LossSettings(off_policy=off)
    first = samples[: inner or len(samples)]
    model = reference_model(folder)
    expected = reference_loss([reference_logprobs(model, s) for s in first], first, loss)
    expected.backward()
    for tokens in (2048, 24):
        settings = settings_for(folder, max_tokens_per_micro_batch=tokens, samples_per_optimizer_step=inner)
        found = first_gradients(LocalBackend(replace(settings, loss=loss)), samples)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=2e-3, atol=2e-6)


def test_only_a_second_optimizer_step_needs_a_forward_for_the_old_policy_and_interpolation_none(tmp_path):
    folder, samples = make_model(tmp_path), make_samples(seed=6, groups=2, members=4)
    for off, inner, forwards in (
        (OffPolicy("decoupled"), None, 0),
        (OffPolicy("decoupled"), 4, 1),
        (OffPolicy("decoupled", prox="interpolate"), 4, 0),
    ):
        backend = LocalBackend(
            replace(settings_for(folder), loss=LossSettings(off_policy=off), samples_per_optimizer_step=inner)
        )
        asked = []
        original = backend.logprobs
        backend.logprobs = lambda s, o=original, a=asked: (a.append(1), o(s))[1]  # type: ignore
        backend.train(batch_of(samples))
        assert len(asked) == forwards, off


@pytest.mark.parametrize("kind", ["none", "tis", "mis", "sequence", "decoupled"])
def test_the_report_tells_the_weights(tmp_path, kind):
    folder, samples = make_model(tmp_path), make_samples(seed=7, groups=3, members=3)
    off = OffPolicy(kind, low=0.9, cap=1.1)
    settings = replace(settings_for(folder, max_tokens_per_micro_batch=30), loss=LossSettings(off_policy=off))
    backend = LocalBackend(settings)
    old = backend.logprobs(samples)
    report = backend.train(batch_of(samples))
    gaps = [[float(o) - b for o, b in zip(old[i], s.logprobs)] for i, s in enumerate(samples)]
    masks = [s.loss_mask for s in samples]
    weights = reference_weights(gaps, masks, off)
    kept = [w for ws, mask in zip(weights, masks) for w, m in zip(ws, mask) if m]
    plain = [math.exp(g) for gap, mask in zip(gaps, masks) for g, m in zip(gap, mask) if m]
    units, of_token = plain, plain
    if kind == "sequence":
        units = [math.exp(sum(g for g, m in zip(gap, mask) if m)) for gap, mask in zip(gaps, masks)]
        of_token = [u for u, mask in zip(units, masks) for m in mask if m]
    outside = sum(not 0.9 <= u <= 1.1 for u in of_token) if kind != "none" else 0
    assert report.importance_mean == pytest.approx(sum(kept) / len(kept), rel=1e-4)
    assert report.importance_max == pytest.approx(max(kept), rel=1e-4)
    assert report.importance_bounded_share == pytest.approx(outside / len(kept))
    share = sum(units) ** 2 / (len(units) * sum(u * u for u in units))
    assert report.effective_sample_share == pytest.approx(share, rel=1e-4) and share < 0.999
    k3 = [math.exp(g) - 1 - g for gap, mask in zip(gaps, masks) for g, m in zip(gap, mask) if m]
    assert report.mismatch_k3 == pytest.approx(sum(k3) / len(k3), rel=1e-3)


def test_bounds_by_hand():
    gap = torch.tensor([math.log(0.4), 0.0, math.log(6.0)])
    sample = torch.tensor([0, 0, 1])
    for kind, expected in (
        ("none", [1.0, 1.0, 1.0]),
        ("tis", [0.4, 1.0, 2.0]),
        ("mis", [0.0, 1.0, 0.0]),
        ("sequence", [0.4, 0.4, 2.0]),
        ("decoupled", [0.4, 1.0, 0.0]),
    ):
        assert importance(gap, sample, OffPolicy(kind)).weights.tolist() == pytest.approx(expected, rel=1e-5)


def test_a_product_over_a_long_response_stays_finite():
    gap = torch.full((4000,), 0.5)
    found = importance(gap, torch.zeros(4000, dtype=torch.int64), OffPolicy("sequence"))
    assert found.weights.tolist() == [2.0] * 4000 and found.bounded.all()
    assert math.isfinite(float(found.units**2))


def test_masked_tokens_are_in_no_sequences_weight(tmp_path):
    """A token over the staleness bound is context for the rest: it has neither loss nor part in the product."""
    folder = make_model(tmp_path)
    sample = make_samples(seed=3, groups=1, members=1, longest=9)[0]
    count = len(sample.response_ids)
    assert count > 2
    loss = LossSettings(off_policy=OffPolicy("sequence", cap=100.0))
    masked = replace(sample, loss_mask=(0,) + (1,) * (count - 1), logprobs=(-60.0, *sample.logprobs[1:]))
    usual = replace(masked, logprobs=sample.logprobs)
    losses = [
        gradients(LocalBackend(replace(settings_for(folder), loss=loss)), [s])[0] for s in (masked, usual)
    ]
    assert losses[0] == losses[1]


def test_the_loss_divides_by_the_unmasked_count(tmp_path):
    """ROL-20: masked tokens, masked and empty responses are outside the denominator of both aggregations."""
    folder = make_model(tmp_path)
    whole = make_samples(seed=4, groups=2, members=2)
    ghost = replace(whole[0], loss_mask=(0,) * len(whole[0].loss_mask))
    empty = replace(whole[0], response_ids=(), logprobs=(), loss_mask=(), advantages=(), lags=())
    for aggregate in ("token", "sample"):
        settings = settings_for(folder, aggregate=aggregate)
        alone, beside = (
            gradients(LocalBackend(settings), samples) for samples in (whole, (*whole, ghost, empty))
        )
        assert alone[0] == beside[0]
        for name, grad in alone[1].items():
            assert torch.equal(grad, beside[1][name])


def test_few_effective_samples_are_told_then_end_the_run(tmp_path, caplog):
    folder, samples = make_model(tmp_path), make_samples(seed=8)
    torn = [replace(samples[0], logprobs=(-12.0,) * len(samples[0].logprobs)), *samples[1:]]
    off = OffPolicy("tis", min_ess=0.5, max_low_steps=1)
    settings = replace(settings_for(folder, lr=1e-6), loss=LossSettings(off_policy=off))
    backend = LocalBackend(settings)
    assert backend.train(batch_of(torn)).effective_sample_share < 0.5
    assert "step 0: the effective sample size is 0." in caplog.text and "--min-ess is 0.5" in caplog.text
    assert backend.train(batch_of(samples, 1)).effective_sample_share > 0.5  # the row is broken
    backend.train(batch_of(torn, 2))
    saved = tmp_path / "saved"
    saved.mkdir()
    backend.save(saved)
    resumed = LocalBackend(settings)
    resumed.load(saved)
    for trainer in (backend, resumed):
        with pytest.raises(TrainError, match=r"2 steps in a row \(--max-low-ess-steps 1\)"):
            trainer.train(batch_of(torn, 3))


@pytest.mark.parametrize(("above", "warns"), [(1e-3, True), (-1e-3, False)])
def test_the_bound_on_the_effective_sample_size_is_where_it_says(tmp_path, caplog, above, warns):
    folder, samples = make_model(tmp_path), make_samples(seed=8)
    share = LocalBackend(settings_for(folder)).train(batch_of(samples)).effective_sample_share
    off = OffPolicy("none", min_ess=share + above)
    LocalBackend(replace(settings_for(folder), loss=LossSettings(off_policy=off))).train(batch_of(samples))
    assert ("effective sample size" in caplog.text) == warns


def test_contradictions_of_the_correction_are_told(tmp_path):
    for off, flag in (
        (OffPolicy("tis", cap=0.5), "--off-policy-clip"),
        (OffPolicy("mis", low=1.5), "--off-policy-clip"),
        (OffPolicy("tis", rollout_logprobs=True), "--use-rollout-logprobs"),
        (OffPolicy("tis", min_ess=1.5), "--min-ess"),
        (OffPolicy("tis", max_low_steps=-1), "--max-low-ess-steps"),
    ):
        faults = replace(settings_for(tmp_path), loss=LossSettings(off_policy=off)).faults()
        assert len(faults) == 1 and flag in faults[0].where
