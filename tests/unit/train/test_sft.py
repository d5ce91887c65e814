"""Supervised fine-tuning against the loss of transformers, on the whole step at once and padded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.train_models import batch_of, gradients, make_model, make_samples, reference_model, settings_for
from turnout.core.types import but
from turnout.train.local import LocalBackend


def shown(seed=0, **given):
    """Samples as of data: log-probs that no engine gave, no advantages."""
    samples = make_samples(seed=seed, **given)
    return [
        but(s, logprobs=(0.0,) * len(s.response_ids), advantages=(0.0,) * len(s.response_ids))
        for s in samples
    ]


def transformers_loss(model, samples):
    """Padded, with the labels of masked tokens and prompts left out: what `Trainer` computes."""
    longest = max(len(s.prompt_ids) + len(s.response_ids) for s in samples)
    ids, labels, attention = [], [], []
    for s in samples:
        row = [*s.prompt_ids, *s.response_ids]
        wanted = [-100] * len(s.prompt_ids) + [t if m else -100 for t, m in zip(s.response_ids, s.loss_mask)]
        pad = longest - len(row)
        ids.append(row + [0] * pad)
        labels.append(wanted + [-100] * pad)
        attention.append([1] * len(row) + [0] * pad)
    batch = {"input_ids": ids, "labels": labels, "attention_mask": attention}
    return model(**{name: torch.tensor(rows) for name, rows in batch.items()}).loss


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("budget", [4096, 25])
def test_loss_and_gradients_are_those_of_transformers(tmp_path, kind, budget):
    folder, samples = make_model(tmp_path, kind, tied=False), shown(seed=4)
    settings = settings_for(folder, name="sft", max_tokens_per_micro_batch=budget)
    loss, found = gradients(LocalBackend(settings), samples)
    model = reference_model(folder)
    expected = transformers_loss(model, samples)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            found[name], parameter.grad, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_it_learns_the_answers_and_nothing_is_off_policy(tmp_path):
    """The data's tokens were made by nobody: no mismatch, all samples count in full, several steps need no forward
    of their own."""
    folder, samples = make_model(tmp_path), shown(seed=5)
    settings = replace(settings_for(folder, name="sft", lr=1e-2), samples_per_optimizer_step=3)
    backend = LocalBackend(settings)
    asked = backend.logprobs
    backend.logprobs = lambda _: pytest.fail("no log-probs from before the step are needed")
    reports = [backend.train(batch_of(samples, step)) for step in range(30)]
    assert reports[-1].loss < 0.2 * reports[0].loss
    for report in reports:
        assert report.optimizer_steps == 3 and report.effective_sample_share == 1
        assert report.mismatch_mean == 0 and report.mismatch_k3 == 0 and report.importance_mean == 1
    likely = [p for s, values in zip(samples, asked(samples)) for p, m in zip(values, s.loss_mask) if m]
    assert sum(likely) / len(likely) > -1
