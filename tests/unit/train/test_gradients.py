"""Packing, shared prompts, the chunked head and flat gradients against plain transformers, unpacked."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tests.train_models import (
    KINDS,
    gradients,
    make_model,
    make_samples,
    reference_logprobs,
    reference_loss,
    reference_model,
    settings_for,
)  # fmt: skip
from turnout.train import attention, head, packing
from turnout.train.local import LocalBackend


def reference_gradients(folder, samples, settings):
    model = reference_model(folder)
    logprobs = [reference_logprobs(model, s, settings.temperature) for s in samples]
    loss = reference_loss(logprobs, samples, settings.loss)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_equal_the_plain_reference(tmp_path, kind, tied):
    folder, samples = make_model(tmp_path, kind, tied), make_samples()
    settings = settings_for(folder, temperature=0.7)
    loss, found = gradients(LocalBackend(settings), samples)
    expected_loss, expected = reference_gradients(folder, samples, settings)
    assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-7)
    assert_close(found, expected)


@pytest.mark.parametrize("budget", [20, 33, 60, 4096])
@pytest.mark.parametrize("aggregate", ["token", "sample"])
def test_gradients_do_not_depend_on_the_micro_batches(tmp_path, budget, aggregate):
    folder, samples = make_model(tmp_path), make_samples(seed=4, groups=4, members=4)
    settings = settings_for(folder, max_tokens_per_micro_batch=budget, aggregate=aggregate)
    backend = LocalBackend(settings)
    loss, found = gradients(backend, samples)
    expected_loss, expected = reference_gradients(folder, samples, settings)
    assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-7)
    assert_close(found, expected)
    assert (len(backend._plan(samples, range(len(samples)))) > 1) == (budget < 100)


def test_small_blocks_of_queries_tails_words_and_rows_change_nothing(tmp_path):
    folder, samples = make_model(tmp_path), make_samples(seed=2, longest=30)
    settings = settings_for(folder, head_chunk_tokens=5)
    _, expected = reference_gradients(folder, samples, settings)
    with (
        mock.patch.multiple(packing, QUERY_BLOCK=4, TAIL_BLOCK=6),
        mock.patch.object(head, "VOCABULARY_BLOCK", 13),
        mock.patch.object(attention, "MAX_PAIRS", 30),
    ):
        _, found = gradients(LocalBackend(settings), samples)
    assert_close(found, expected)


def test_gradient_checkpointing_changes_nothing(tmp_path):
    folder, samples = make_model(tmp_path), make_samples(seed=3)
    _, plain = gradients(LocalBackend(settings_for(folder)), samples)
    _, again = gradients(LocalBackend(settings_for(folder, gradient_checkpointing=True)), samples)
    assert_close(again, plain)


def test_at_ratio_one_the_gradient_is_that_of_reinforce(tmp_path):
    folder, samples = make_model(tmp_path), make_samples(seed=5)
    _, found = gradients(LocalBackend(settings_for(folder)), samples)
    model = reference_model(folder)
    tokens = sum(sum(s.loss_mask) for s in samples)
    total = torch.zeros(())
    for sample in samples:
        weight = torch.tensor(sample.advantages) * torch.tensor(sample.loss_mask) / tokens
        total = total - (weight * reference_logprobs(model, sample)).sum()
    total.backward()
    assert_close(found, {n: p.grad for n, p in model.named_parameters()})


def test_logprobs_of_all_response_tokens_equal_the_reference(tmp_path):
    folder, samples = make_model(tmp_path, "qwen3", tied=False), make_samples(seed=6)
    backend = LocalBackend(settings_for(folder, temperature=1.3, max_tokens_per_micro_batch=40))
    model = reference_model(folder)
    for found, sample in zip(backend.logprobs(samples), samples, strict=True):
        expected = reference_logprobs(model, sample, 1.3).detach()
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-5)


def test_bf16_gradients_are_near_the_fp32_ones_and_masters_stay_fp32(tmp_path):
    folder, samples = make_model(tmp_path, dtype=torch.bfloat16), make_samples(seed=7)
    backend = LocalBackend(settings_for(folder, dtype="bfloat16", max_tokens_per_micro_batch=40))
    _, found = gradients(backend, samples)
    _, expected = gradients(LocalBackend(settings_for(folder)), samples)
    a = torch.cat([found[n].flatten() for n in sorted(found)])
    b = torch.cat([expected[n].flatten() for n in sorted(found)])
    assert torch.cosine_similarity(a, b, dim=0) > 0.99
    assert backend._flat.master.dtype == backend._flat.grad.dtype == torch.float32
    assert {p.dtype for p in backend._model.module.parameters()} == {torch.bfloat16}
    assert all(p.grad is None for p in backend._model.module.parameters())
