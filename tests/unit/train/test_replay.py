"""Routing replay against plain transformers whose routers are made to choose the recorded experts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.train_models import (
    batch_of,
    gradients,
    make_model,
    make_samples,
    reference_logprobs,
    reference_loss,
    reference_model,
    settings_for,
)
from turnout.core.errors import TrainError
from turnout.train.local import LocalBackend

LAYERS, EXPERTS, K = 2, 4, 2


def perturbed(folder, noise):
    """The engine: a model whose routers are not quite the trainer's."""
    torch.manual_seed(7)
    model = reference_model(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".mlp.gate.weight"):
                parameter.add_(noise * torch.randn_like(parameter))
    return model


def chosen_by(model, sample):
    """int16 [positions but the last, layers x k]"""
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])[:, :-1]
    with torch.no_grad():
        routers = model(ids, output_router_logits=True).router_logits
    return torch.cat([logits.topk(K, -1).indices for logits in routers], -1).to(torch.int16).numpy()


def recorded(folder, samples, noise=0.3, prompts=True):
    """The samples with what a perturbed engine chose, and its log-probs."""
    engine = perturbed(folder, noise)
    made = []
    for s in samples:
        rows = chosen_by(engine, s)
        if not prompts:
            rows[: len(s.prompt_ids) - 1] = -1
        with torch.no_grad():
            logprobs = tuple(reference_logprobs(engine, s).tolist())
        made.append(replace(s, routed=rows.tobytes(), logprobs=logprobs))
    return tuple(made)


def forced(model, sample):
    """Makes the routers choose what this sample has on record; the layers' own choice where it has nothing."""
    count = len(sample.prompt_ids) + len(sample.response_ids)
    rows = np.full((count, LAYERS, K), -1, np.int64)
    if sample.routed:
        rows[:-1] = np.frombuffer(sample.routed, np.int16).reshape(-1, LAYERS, K)
    for layer, block in enumerate(model.model.layers):
        gate = block.mlp.gate

        told_here = torch.from_numpy(rows[:, layer])

        def forward(hidden, gate=gate, told=told_here):
            logits = F.linear(hidden, gate.weight)
            probs = logits.softmax(-1)
            index = torch.stack([t if t[0] >= 0 else p.topk(K).indices for t, p in zip(told, probs)])
            weights = torch.stack([p[i] / p[i].sum() for p, i in zip(probs, index)])
            return logits, weights, index

        gate.forward = forward
    return model


def reference(folder, samples, settings):
    """Loss and gradients, one sequence at a time."""
    model = reference_model(folder)
    logprobs = [reference_logprobs(forced(model, s), s) for s in samples]
    loss = reference_loss(logprobs, samples, settings.loss)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}, logprobs


@pytest.fixture
def folder(tmp_path):
    return make_model(tmp_path, "qwen3_moe")


@pytest.mark.parametrize("budget", [24, 4096])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_gradients_are_those_of_the_recorded_experts(folder, budget, checkpointing):
    samples = recorded(folder, make_samples(seed=5))
    settings = settings_for(folder, max_tokens_per_micro_batch=budget, gradient_checkpointing=checkpointing)
    loss, grads = gradients(LocalBackend(settings), samples)
    expected, slow, _ = reference(folder, samples, settings)
    assert loss == pytest.approx(expected, rel=1e-5)
    for name, grad in slow.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-6, msg=name)
    _, own = gradients(LocalBackend(settings), [replace(s, routed=b"") for s in samples])
    assert any(not torch.allclose(own[name], grad, rtol=1e-2) for name, grad in slow.items())


def test_tokens_without_a_record_go_where_the_trainer_sends_them(folder):
    """Prompts without, samples without, and some rows of a response."""
    first, *rest = recorded(folder, make_samples(seed=6), prompts=False)
    rows = np.frombuffer(rest[0].routed, np.int16).reshape(-1, LAYERS * K).copy()
    rows[len(rest[0].prompt_ids) :: 2] = -1
    samples = (first, replace(rest[0], routed=rows.tobytes()), *rest[1:-3])
    samples += tuple(replace(s, routed=b"") for s in rest[-3:])
    backend = LocalBackend(settings_for(folder))
    found = backend.logprobs(samples)
    _, _, slow = reference(folder, samples, backend.settings)
    for ours, theirs in zip(found, slow, strict=True):
        np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=2e-5)
    assert 0 < backend.train(batch_of(samples)).routing_recorded_share < 1


def test_the_mismatch_falls_and_the_share_of_other_choices_is_told(folder):
    samples = recorded(folder, make_samples(seed=8, groups=6, longest=20))
    with_record = LocalBackend(settings_for(folder)).train(batch_of(samples))
    without = LocalBackend(settings_for(folder)).train(batch_of([replace(s, routed=b"") for s in samples]))
    assert with_record.mismatch_mean < 0.7 * without.mismatch_mean
    assert with_record.routing_recorded_share == 1.0
    assert (without.routing_recorded_share, without.routing_changed_share) == (0.0, 0.0)
    assert 0.05 < with_record.routing_changed_share < 0.9


def test_equal_routers_choose_nothing_else(folder):
    samples = recorded(folder, make_samples(seed=9), noise=0.0)
    backend = LocalBackend(settings_for(folder, gradient_checkpointing=True))
    for _ in range(2):  # what is computed again does not count twice
        backend._optimizer.step = lambda lr, norm: None
        report = backend.train(batch_of(samples))
        assert (report.routing_recorded_share, report.routing_changed_share) == (1.0, 0.0)


def test_a_record_of_another_model_is_one_error(folder, tmp_path):
    sample = recorded(folder, make_samples(seed=1, groups=1, members=1))[0]
    rows = np.frombuffer(sample.routed, np.int16)
    backend = LocalBackend(settings_for(folder))
    with pytest.raises(TrainError, match=r"of another model: 6 values a token.*2 layers, 2 of 4 experts"):
        backend.train(batch_of([replace(sample, routed=np.zeros(len(rows) // 4 * 6, np.int16).tobytes())]))
    with pytest.raises(TrainError, match="the highest 4"):
        backend.train(batch_of([replace(sample, routed=np.full_like(rows, 4).tobytes())]))
    with pytest.raises(TrainError, match="bytes of routed experts for"):
        backend.train(batch_of([replace(sample, routed=sample.routed[:-2])]))
    dense = LocalBackend(settings_for(make_model(tmp_path / "dense")))
    with pytest.raises(TrainError, match="the trainer's model has none"):
        dense.train(batch_of([sample]))
