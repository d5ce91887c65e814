"""On-policy distillation: the advantages, and that their gradient is that of the reverse KL."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.train_models import batch_of, gradients, make_model, make_samples, settings_for
from turnout.core.types import but
from turnout.train.local import LocalBackend
from turnout.train.taught import taught


def with_teacher(samples, shift=0.5):
    return [
        but(s, teacher=tuple(p + shift * (1 if t % 2 else -1) for t, p in enumerate(s.logprobs)))
        for s in samples
    ]


def test_each_token_is_pulled_by_its_own_log_ratio():
    sample = but(make_samples()[0], logprobs=(-1.0, -2.0), advantages=(0.25, 0.25), teacher=(-1.5, -1.0))
    (found,) = taught([sample], 0.5)
    assert found.advantages == pytest.approx((0.25 - 0.25, 0.25 + 0.5))
    assert taught([sample], 0.0)[0].advantages == sample.advantages


def test_a_teacher_alone_trains_and_one_that_agrees_changes_nothing(tmp_path):
    folder, samples = (
        make_model(tmp_path),
        [but(s, advantages=(0.0,) * len(s.response_ids)) for s in make_samples()],
    )
    settings = replace(settings_for(folder), opd_kl_coef=2.0)
    _, none = gradients(LocalBackend(settings), with_teacher(samples, 0.0))
    assert all(float(grad.abs().max()) == 0 for grad in none.values())
    _, found = gradients(LocalBackend(settings), with_teacher(samples))
    given = [but(s, advantages=a.advantages) for s, a in zip(samples, taught(with_teacher(samples), 2.0))]
    _, wanted = gradients(LocalBackend(settings_for(folder)), given)
    assert any(float(grad.abs().max()) > 0 for grad in found.values())
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_it_is_the_gradient_of_the_reverse_kl():
    """Over all tokens of a small vocabulary, each weighed by its probability: the expectation of the surrogate's
    gradient, A times that of log pi, is the gradient of -KL(pi || teacher)."""
    torch.manual_seed(0)
    logits, teacher = torch.randn(7, requires_grad=True), torch.log_softmax(torch.randn(7), 0)
    policy = torch.log_softmax(logits, 0)
    (wanted,) = torch.autograd.grad(-(policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)
    sample = but(
        make_samples()[0],
        response_ids=tuple(range(7)),
        logprobs=tuple(policy.tolist()),
        loss_mask=(1,) * 7,
        advantages=(0.0,) * 7,
        teacher=tuple(teacher.tolist()),
    )
    advantages = torch.tensor(taught([sample], 1.0)[0].advantages)
    (found,) = torch.autograd.grad((policy.exp().detach() * advantages * policy).sum(), logits)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_a_step_of_a_real_trainer_comes_nearer_to_the_teacher(tmp_path):
    """The teacher is another model: its log-probs of the same tokens, as its engines would give them."""
    student, teacher = (LocalBackend(settings_for(make_model(tmp_path / str(n), seed=n))) for n in (1, 2))
    student.settings = replace(student.settings, opd_kl_coef=1.0)
    samples = [but(s, loss_mask=(1,) * len(s.response_ids)) for s in make_samples(groups=8, members=4)]
    zero = [but(s, advantages=(0.0,) * len(s.response_ids)) for s in samples]

    def informed():
        mine, theirs = student.logprobs(zero), teacher.logprobs(zero)
        return [
            but(s, logprobs=tuple(a.tolist()), teacher=tuple(b.tolist()))
            for s, a, b in zip(zero, mine, theirs)
        ]

    def surplus():
        """How much likelier than to the teacher the tokens are that it finds unlikely, and the other way round."""
        return sum(abs(a - b) for s in informed() for a, b in zip(s.logprobs, s.teacher))

    before = surplus()
    for step in range(5):
        student.train(batch_of(informed(), step))
    assert surplus() < 0.8 * before
