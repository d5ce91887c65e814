"""Whole train steps: several optimizer steps, references, schedule, clipping, faults, reports, determinism."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
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
    settings_for,
)  # fmt: skip
from turnout.core.errors import ConfigError, ModelError, TrainError
from turnout.train.backend import make_backend
from turnout.train.local import LocalBackend
from turnout.train.lr_schedule import learning_rate
from turnout.train.settings import OptimizerSettings


def test_three_steps_equal_transformers_and_torch_adamw(tmp_path):
    folder = make_model(tmp_path)
    settings = settings_for(folder, lr=3e-3, clip_grad=0.05, weight_decay=0.1, max_tokens_per_micro_batch=40)
    backend = LocalBackend(settings)
    model = reference_model(folder)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    o = settings.optimizer
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=o.lr,
        betas=o.betas,
        eps=o.eps,
    )
    for step in range(3):
        samples = make_samples(seed=20 + step)
        report = backend.train(batch_of(samples, step))
        loss = reference_loss([reference_logprobs(model, s) for s in samples], samples, settings.loss)
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        adamw.step()
        assert report.loss == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
        assert report.grad_norm == pytest.approx(float(norm), rel=1e-4)
        assert report.grad_norm > 0.05
    mine = dict(backend._model.module.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(mine[name], p, rtol=2e-4, atol=2e-5)
    assert backend.steps_done == 3


def test_several_optimizer_steps_use_log_probs_from_before_the_first(tmp_path):
    folder, samples = make_model(tmp_path), make_samples(seed=31, groups=2, members=4)
    backend = LocalBackend(
        settings_for(folder, samples_per_optimizer_step=4, lr=0.05, eps_clip=0.05, eps_clip_high=0.05)
    )
    before = backend.logprobs(samples)
    report = backend.train(batch_of(samples))
    assert report.optimizer_steps == 2 and report.sequences == 8
    assert report.clip_fraction > 0 and report.approx_kl > 0
    gap = np.concatenate(
        [np.abs(b - np.float32(s.logprobs))[np.array(s.loss_mask) > 0] for b, s in zip(before, samples)]
    )
    assert report.mismatch_mean == pytest.approx(float(gap.mean()), rel=1e-4)
    assert report.mismatch_max == pytest.approx(float(gap.max()), rel=1e-4)


def test_the_second_of_two_optimizer_steps_has_the_gradient_of_the_loop(tmp_path):
    folder, samples = make_model(tmp_path), make_samples(seed=32, groups=2, members=2)
    settings = settings_for(folder, samples_per_optimizer_step=2, lr=0.02, eps_clip=0.5, eps_clip_high=0.5)
    backend = LocalBackend(settings)
    old = backend.logprobs(samples)
    first = LocalBackend(replace(settings, samples_per_optimizer_step=None))
    first.train(batch_of(samples[:2]))
    model = reference_model(folder)
    with torch.no_grad():
        for p, view in zip(
            model.parameters(),
            (dict(first._model.module.named_parameters())[n] for n, _ in model.named_parameters()),
        ):
            p.copy_(view)
    loss = reference_loss(
        [reference_logprobs(model, s) for s in samples[2:]], samples[2:], settings.loss, old=old[2:]
    )
    losses = []
    original = backend._optimizer.step
    backend._optimizer.step = lambda lr, norm: (losses.append(norm), original(lr, norm))[1]
    backend.train(batch_of(samples))
    loss.backward()
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in model.parameters()))
    assert losses[1] == pytest.approx(norm, rel=1e-3)


def test_kl_to_a_reference_has_the_gradient_of_the_loop(tmp_path):
    folder, other = make_model(tmp_path / "a"), make_model(tmp_path / "b", seed=9)
    samples = make_samples(seed=33)
    settings = settings_for(folder, reference=other, kl_coef=0.5, kl_kind="k3")
    loss, found = gradients(LocalBackend(settings), samples)
    frozen, model = reference_model(other), reference_model(folder)
    ref = [reference_logprobs(frozen, s).detach() for s in samples]
    expected = reference_loss(
        [reference_logprobs(model, s) for s in samples], samples, settings.loss, reference=ref
    )
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=2e-3, atol=1e-5)


def test_a_reference_without_a_coefficient_is_measured_only(tmp_path):
    folder, samples = make_model(tmp_path / "a"), make_samples(seed=34)
    own = LocalBackend(settings_for(folder, reference=folder)).train(batch_of(samples))
    other = LocalBackend(settings_for(folder, reference=make_model(tmp_path / "b", seed=3))).train(
        batch_of(samples)
    )
    none = LocalBackend(settings_for(folder)).train(batch_of(samples))
    assert own.reference_kl == pytest.approx(0.0, abs=1e-7) and other.reference_kl > 0.01
    assert own.loss == other.loss == none.loss


@pytest.mark.parametrize("poison", ["advantage", "weight"])
def test_non_finite_steps_are_skipped_counted_and_ended(tmp_path, poison):
    folder, good = make_model(tmp_path), make_samples(seed=35)
    backend = LocalBackend(settings_for(folder, max_nonfinite_steps=2))
    backend.train(batch_of(good))
    bad = (
        replace(
            good[0], advantages=(math.nan if poison == "advantage" else math.inf,) * len(good[0].response_ids)
        ),
        *good[1:],
    )
    weights = backend._flat.master.clone()
    for _ in range(2):
        report = backend.train(batch_of(bad))
        assert report.skipped_nonfinite == 1 and report.optimizer_steps == 0
        assert torch.equal(backend._flat.master, weights)
    assert backend.train(batch_of(good)).optimizer_steps == 1  # the row is broken
    assert backend._optimizer.steps == 2
    for _ in range(2):
        backend.train(batch_of(bad))
    with pytest.raises(TrainError, match="3 optimizer steps in a row"):
        backend.train(batch_of(bad))


def test_a_batch_without_a_trainable_token_is_skipped_and_counted(tmp_path, caplog):
    folder = make_model(tmp_path)
    backend = LocalBackend(settings_for(folder))
    weights = backend._flat.master.clone()
    masked = [replace(s, loss_mask=(0,) * len(s.loss_mask)) for s in make_samples()]
    for samples in ([], masked):
        report = backend.train(batch_of(samples))
        assert report.skipped_empty == 1 and report.optimizer_steps == 0 and report.tokens == 0
    assert torch.equal(backend._flat.master, weights)
    assert "no token of the batch may train" in caplog.text
    assert backend.steps_done == 2


def test_a_sequence_above_the_budget_names_the_flag_and_changes_nothing(tmp_path):
    backend = LocalBackend(settings_for(make_model(tmp_path), max_tokens_per_micro_batch=12))
    weights = backend._flat.master.clone()
    with pytest.raises(ConfigError, match="--max-tokens-per-gpu"):
        backend.train(batch_of(make_samples(seed=1, longest=30)))
    assert torch.equal(backend._flat.master, weights)


def test_the_report_measures_parts_by_the_given_clock(tmp_path):
    ticks = iter(range(10_000))
    backend = LocalBackend(settings_for(make_model(tmp_path)), now=lambda: float(next(ticks)))
    report = backend.train(batch_of(make_samples(), 7))
    assert (report.seconds_forward, report.seconds_backward, report.seconds_optimizer) == (1.0, 1.0, 1.0)
    assert report.seconds_total > 3 and report.step == 7
    metrics = report.metrics()
    assert all(isinstance(v, float) for v in metrics.values())
    assert metrics["tokens"] == sum(sum(s.loss_mask) for s in make_samples())
    assert 0 < metrics["entropy"] < math.log(97) + 1e-3 and 0 < metrics["effective_sample_share"] <= 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_batches_twice_give_equal_bits(tmp_path, dtype):
    folder = make_model(tmp_path, "qwen3_moe", tied=False)
    runs = []
    try:
        for _ in range(2):
            backend = LocalBackend(
                settings_for(folder, deterministic=True, dtype=dtype, max_tokens_per_micro_batch=60)
            )
            reports = [backend.train(batch_of(make_samples(seed=40 + i), i)) for i in range(3)]
            runs.append((backend._flat.master.clone(), [(r.loss, r.grad_norm) for r in reports]))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1]


def test_learning_rate_by_hand():
    cosine = OptimizerSettings(lr=1.0, schedule="cosine", warmup_steps=2, total_steps=12, min_lr_ratio=0.1)
    assert [learning_rate(cosine, s) for s in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert learning_rate(cosine, 7) == pytest.approx(0.55)
    assert learning_rate(cosine, 12) == learning_rate(cosine, 99) == pytest.approx(0.1)
    linear = replace(cosine, schedule="linear", warmup_steps=0, total_steps=10, min_lr_ratio=0.0)
    assert [learning_rate(linear, s) for s in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])
    assert learning_rate(OptimizerSettings(lr=0.3), 10**6) == 0.3


def test_all_faults_of_the_settings_and_the_model_are_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        make_backend(settings_for(tmp_path, threads=0, lr=-1.0, kl_coef=0.1, temperature=0.0, eps_clip=2.0))
    assert len(caught.value.faults) == 5
    with pytest.raises(ModelError, match="no readable HF model"):
        make_backend(settings_for(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ModelError, match="model_type = gpt2"):
        make_backend(settings_for(tmp_path))


def test_samples_without_an_advantage_are_measured_but_not_differentiated(tmp_path):
    folder, samples = make_model(tmp_path), make_samples(seed=8)
    dead = samples[0].group_id
    samples = [
        replace(s, advantages=(0.0,) * len(s.advantages)) if s.group_id == dead else s for s in samples
    ]
    settings = settings_for(folder)
    _, found = gradients(LocalBackend(settings), samples)
    model = reference_model(folder)
    logprobs = [reference_logprobs(model, s, settings.temperature) for s in samples]
    reference_loss(logprobs, samples, settings.loss).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=2e-4, atol=2e-6)
    backend = LocalBackend(settings)
    part = backend._slices(list(samples), [])[0]
    measured = {m.sample for micro in part.measured for unit in micro.units for m in unit.members}
    assert measured == {i for i, s in enumerate(samples) if s.group_id == dead}
    assert backend.train(batch_of(samples)).tokens == sum(sum(s.loss_mask) for s in samples)


@pytest.mark.parametrize("coef", ["kl_coef", "entropy_coef"])
def test_with_a_trained_kl_or_entropy_every_sample_has_a_gradient(tmp_path, coef):
    folder, samples = make_model(tmp_path), make_samples(seed=8)
    samples = [replace(s, advantages=(0.0,) * len(s.advantages)) for s in samples]
    part = LocalBackend(settings_for(folder, reference=folder, **{coef: 0.1}))._slices(samples, [])[0]
    assert part.measured == () and part.plan
