"""benchmarks.trainer: what the padded side computes is the loss that Turnout's tests are held against."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.trainer_sides import padded_loss
from benchmarks.trainer_work import GROUP, WORK, samples_of

from tests.train_models import make_model, make_samples, reference_logprobs, reference_loss, reference_model
from turnout.train.settings import LossSettings


def test_the_padded_loss_has_the_gradient_of_the_loop(tmp_path):
    samples = [replace(s, loss_mask=(1,) * len(s.loss_mask)) for s in make_samples(seed=3)]
    tokens = sum(len(s.response_ids) for s in samples)
    folder = make_model(tmp_path)
    padded, loop = reference_model(folder), reference_model(folder)
    for at in range(0, len(samples), 4):
        (padded_loss(padded, samples[at : at + 4]) / tokens).backward()
    expected = reference_loss([reference_logprobs(loop, s) for s in samples], samples, LossSettings())
    expected.backward()
    for mine, theirs in zip(padded.parameters(), loop.parameters()):
        assert mine.grad is not None and theirs.grad is not None
        assert (mine.grad - theirs.grad).abs().max() <= 1e-5 + 2e-3 * theirs.grad.abs().max()


@pytest.mark.parametrize("name", WORK)
def test_both_sides_train_on_the_same_samples(name):
    work = WORK[name]
    found = samples_of(work, 1)
    assert found == samples_of(work, 1) and len(found) == work.groups * GROUP
    lengths = {len(s.response_ids) for s in found}
    assert max(lengths) <= work.response and (len(lengths) > 5) == work.tail
