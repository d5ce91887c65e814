"""Counts of the experts that tokens go to, against the router's choice in plain transformers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.train_models import batch_of, make_model, make_samples, reference_model, settings_for
from turnout.train.expert_load import load_max, unused_share
from turnout.train.local import LocalBackend

EXPERTS = 4


def counted(folder, samples):
    """[layers, experts]: trained tokens, by the experts of the token that predicts them."""
    model, counts = reference_model(folder), [Counter(), Counter()]
    for sample in samples:
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        routers = model(ids, output_router_logits=True).router_logits
        at = [len(sample.prompt_ids) - 1 + t for t, kept in enumerate(sample.loss_mask) if kept]
        for count, logits in zip(counts, routers, strict=True):
            count.update(logits.topk(2, -1).indices[at].flatten().tolist())
    return np.array([[count[e] for e in range(EXPERTS)] for count in counts])


@pytest.mark.parametrize("budget", [20, 4096])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_every_trained_token_counts_once_for_any_packing(tmp_path, budget, checkpointing):
    folder, samples = make_model(tmp_path, "qwen3_moe"), make_samples(seed=4)
    samples = (replace(samples[0], advantages=(0.0,) * len(samples[0].advantages)), *samples[1:])
    settings = settings_for(folder, max_tokens_per_micro_batch=budget, gradient_checkpointing=checkpointing)
    expected = counted(folder, samples)
    backend = LocalBackend(settings)
    for _ in range(2):  # what other calls counted is not in a step's
        backend._optimizer.step = lambda lr, norm: None
        report = backend.train(batch_of(samples))
        assert report.expert_load_max == load_max(expected)
        assert report.expert_unused_share == unused_share(expected)
        backend.logprobs(samples)


def test_a_model_without_experts_has_none(tmp_path):
    report = LocalBackend(settings_for(make_model(tmp_path))).train(batch_of(make_samples()))
    assert (report.expert_load_max, report.expert_unused_share) == (0.0, 0.0)


def test_numbers_by_hand():
    counts = np.array([[4.0, 4.0, 4.0, 4.0], [9.0, 3.0, 0.0, 0.0]])
    assert load_max(counts) == 3.0 and unused_share(counts) == 0.25
    assert load_max(np.zeros((2, 4))) == 0.0 and unused_share(np.zeros((2, 4))) == 0.0
