"""PPO's critic against plain transformers and loops: values, loss, gradients, what it learns, what is kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.train_models import (
    KINDS,
    batch_of,
    gradients,
    make_model,
    make_samples,
    reference_model,
    settings_for,
)
from turnout.core.errors import ModelError, TrainError
from turnout.core.types import but
from turnout.train.gae import gae, terminal_rewards
from turnout.train.local import LocalBackend
from turnout.train.losses.value import value_loss
from turnout.train.settings import AdvantageSettings, CriticSettings, OptimizerSettings


def with_critic(folder, critic=None, **changes):
    """Settings with a critic on the model's own layers, whose fields and learning rate `critic` names."""
    given = {"lr": 1e-2} | (critic or {})
    optimizer = OptimizerSettings(lr=given.pop("lr"))
    advantage = AdvantageSettings(
        "none", gamma=changes.pop("gamma", 1.0), normalize=changes.pop("normalize", False)
    )
    settings = replace(settings_for(folder, **changes), advantage=advantage)
    return replace(settings, critic=CriticSettings(folder, optimizer=optimizer, **given))


def rewarded(samples):
    return [but(s, reward=float(sum(s.response_ids) % 5) - 1) for s in samples]


def backend_of(folder, seed=0, **changes):
    """A trainer whose critic has a head that is not zero, as after some steps."""
    backend = LocalBackend(with_critic(folder, **changes))
    flat = backend._critic.model.flat
    torch.manual_seed(seed)
    for name, view in zip(flat.names, flat.views(flat.master)):
        if name.startswith("value_head"):
            view.copy_(torch.randn_like(view) * 0.3)
    flat.refresh_compute()
    return backend


def reference_values(folder, backend, samples):
    """Values of every response token, one sequence at a time, with gradient; and the parameters by name."""
    model = reference_model(folder)
    flat = backend._critic.model.flat
    head = {n: v.clone() for n, v in zip(flat.names, flat.views(flat.master)) if n.startswith("value_head")}
    head = {n: v.requires_grad_() for n, v in head.items()}
    out = []
    for s in samples:
        ids = torch.tensor([[*s.prompt_ids, *s.response_ids]])
        hidden = model.model(ids).last_hidden_state[0, len(s.prompt_ids) - 1 : -1]
        out.append((hidden @ head["value_head.weight"].T + head["value_head.bias"])[:, 0])
    named = dict(model.model.named_parameters(prefix="model"))
    return out, {**named, **head}


def critic_gradients(backend, samples):
    caught = {}
    flat = backend._critic.model.flat

    def keep(lr, norm):
        caught.update({n: v.clone() for n, v in zip(flat.names, flat.views(flat.grad))})

    backend._critic.optimizer.step = keep
    report = backend.train(batch_of(samples))
    return report.critic, caught


def rewards_of(samples):
    return [terminal_rewards(s.reward, s.loss_mask) for s in samples]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("aggregate", "budget"), [("token", 4096), ("sample", 30), ("constant", 40)])
def test_values_loss_and_gradients_equal_the_plain_reference(tmp_path, kind, tied, aggregate, budget):
    """One sequence at a time, GAE and loss in loops; rows are packed, prompts shared."""
    folder, samples = make_model(tmp_path, kind, tied), rewarded(make_samples(seed=3))
    backend = backend_of(
        folder,
        critic={"lambd": 0.7},
        gamma=0.9,
        max_tokens_per_micro_batch=budget,
        aggregate=aggregate,
    )
    expected, parameters = reference_values(folder, backend, samples)
    found = backend._critic.estimates(samples, rewards_of(samples))
    total, tokens = torch.zeros(()), sum(sum(s.loss_mask) for s in samples)
    for index, s in enumerate(samples):
        trained = [t for t, m in enumerate(s.loss_mask) if m]
        values = expected[index][trained]
        np.testing.assert_allclose(found.values[index][trained], values.detach(), rtol=1e-4, atol=1e-5)
        rewards = np.array([0.0] * (len(trained) - 1) + [s.reward])
        advantages, returns = gae(rewards, values.detach().double().numpy(), 0.9, 0.7)
        np.testing.assert_allclose(found.advantages[index][trained], advantages, rtol=1e-4, atol=1e-5)
        share = 1 / (len(samples) * len(trained)) if aggregate == "sample" else 1 / tokens
        for value, target in zip(values, returns):
            total = total + share * (value - float(target)) ** 2 / 2
    total.backward()
    report, grads = critic_gradients(backend, samples)
    assert report.value_loss == pytest.approx(total.item(), rel=1e-4)
    assert grads.keys() == parameters.keys()
    for name, parameter in parameters.items():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(
            grads[name], wanted, rtol=3e-4, atol=3e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_loss_pulls_no_value_further_than_the_clip():
    """Against the formula by hand: old 0, clip 0.2, in all orders of value and return."""
    values = torch.tensor([0.1, 0.5, 0.5, -0.5, 0.5], requires_grad=True)
    returns = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.45])
    weights = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25])
    loss, clipped = value_loss(values, torch.zeros(5), returns, weights, 0.2)
    expected, grads = 0.0, []
    for v, r, w in zip(values.tolist(), returns.tolist(), weights.tolist()):
        near = min(max(v, -0.2), 0.2)
        expected += w * max((v - r) ** 2, (near - r) ** 2) / 2
        grads.append(w * (v - r) if (v - r) ** 2 >= (near - r) ** 2 else 0.0)
    assert float(loss.detach()) == pytest.approx(expected)
    loss.backward()
    assert values.grad.tolist() == pytest.approx(grads)
    assert [g == 0 for g in grads] == [False, True, False, True, True] and clipped == 3


def test_advantages_of_a_new_critic_are_the_rewards_and_train_the_policy(tmp_path):
    """Its values are 0: with gamma and lambda 1 every trained token has the reward of its response."""
    folder, samples = make_model(tmp_path), rewarded(make_samples(seed=5))
    backend = LocalBackend(with_critic(folder))
    _, found = gradients(backend, samples)
    plain = [but(s, advantages=tuple(s.reward * m for m in s.loss_mask)) for s in samples]
    _, expected = gradients(LocalBackend(settings_for(folder)), plain)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.equal(found[name], grad), name


def test_normalised_advantages_have_mean_0_and_deviation_1_over_the_batch(tmp_path):
    folder, samples = make_model(tmp_path), rewarded(make_samples(seed=5))
    advised, _ = LocalBackend(with_critic(folder, normalize=True))._critic.step(samples, rewards_of(samples))
    flat = [a for s in advised for a, m in zip(s.advantages, s.loss_mask) if m]
    assert np.mean(flat) == pytest.approx(0, abs=1e-9) and np.std(flat, ddof=1) == pytest.approx(1)


def test_a_step_of_the_critic_moves_no_policy_and_the_other_way_round(tmp_path):
    folder, samples = make_model(tmp_path), rewarded(make_samples(seed=6))
    for lr, critic_lr in ((0.0, 1e-2), (1e-2, 0.0)):
        backend = backend_of(folder, critic={"lr": critic_lr}, lr=lr)
        policy, critic = backend._flat.master.clone(), backend._critic.model.flat.master.clone()
        report = backend.train(batch_of(samples))
        assert report.grad_norm > 0 and report.critic.value_grad_norm > 0
        assert torch.equal(backend._flat.master, policy) == (lr == 0)
        assert torch.equal(backend._critic.model.flat.master, critic) == (critic_lr == 0)


def test_a_critic_learns_the_value_of_each_prompt(tmp_path):
    """The reward is a function of the prompt alone: the values of all its tokens become it."""
    folder = make_model(tmp_path)
    samples = make_samples(seed=8, groups=4, members=4)
    known = {f"g{n}": value for n, value in enumerate((0.0, 1.0, -0.5, 0.4))}
    samples = [but(s, reward=known[s.group_id]) for s in samples]
    critic = {"lr": 3e-3, "only_steps": 60, "value_clip": 10.0}
    backend = LocalBackend(with_critic(folder, critic=critic))
    reports = [backend.train(batch_of(samples, step)) for step in range(60)]
    assert abs(reports[0].critic.explained_variance) < 1e-6
    assert reports[-1].critic.explained_variance > 0.9
    assert reports[-1].critic.value_loss < 0.1 * reports[0].critic.value_loss
    for s, values in zip(samples, backend._critic.values(samples)):
        off = [abs(v - known[s.group_id]) for v, m in zip(values, s.loss_mask) if m]
        assert np.mean(off) < 0.3


def test_the_policy_waits_for_the_critic_as_long_as_asked(tmp_path):
    folder, samples = make_model(tmp_path), rewarded(make_samples(seed=9))
    backend = LocalBackend(with_critic(folder, critic={"only_steps": 2}))
    before = backend._flat.master.clone()
    for step in range(3):
        report = backend.train(batch_of(samples, step))
        assert report.optimizer_steps == (step == 2) and report.critic.value_loss > 0
        assert report.tokens == sum(sum(s.loss_mask) for s in samples)
        assert torch.equal(backend._flat.master, before) == (step < 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ckp_07_a_saved_critic_goes_on_bit_for_bit_with_its_policy(tmp_path, dtype):
    folder = make_model(tmp_path / "model", dtype=torch.bfloat16)
    settings = with_critic(
        folder, dtype=dtype, schedule="cosine", total_steps=9, samples_per_optimizer_step=5
    )
    batches = [batch_of(rewarded(make_samples(seed=60 + i)), i) for i in range(4)]
    straight, first, resumed = (LocalBackend(settings) for _ in range(3))
    for batch in batches:
        last = straight.train(batch)
    for batch in batches[:2]:
        first.train(batch)
    state = tmp_path / "state"
    state.mkdir()
    first.save(state)
    resumed.train(batches[3])  # another history, which load must replace
    resumed.load(state)
    for batch in batches[2:]:
        report = resumed.train(batch)
    for a, b in ((resumed._flat, straight._flat), (resumed._critic.model.flat, straight._critic.model.flat)):
        assert torch.equal(a.master, b.master) and torch.equal(a.compute, b.compute)
        assert torch.equal(a.exp_avg, b.exp_avg) and torch.equal(a.exp_avg_sq, b.exp_avg_sq)
    assert replace(report.critic, seconds_critic=0) == replace(last.critic, seconds_critic=0)
    assert report.loss == last.loss and resumed._critic.optimizer.steps == 8


def test_a_checkpoint_without_the_critic_is_refused_and_changes_nothing(tmp_path):
    folder = make_model(tmp_path / "model")
    state = tmp_path / "state"
    state.mkdir()
    LocalBackend(settings_for(folder, seed=1)).save(state)
    backend = backend_of(folder)
    before = backend._critic.model.flat.master.clone()
    with pytest.raises(ModelError) as caught:
        backend.load(state)
    parts = [fault.where.rsplit("/", 1)[1].split(": ")[1:] for fault in caught.value.faults]
    names = [f"critic_{name}" for name in sorted(backend._critic.model.flat.names)]
    assert parts == [[kind, name] for kind in ("master", "exp_avg", "exp_avg_sq") for name in names]
    assert torch.equal(backend._critic.model.flat.master, before)


def test_a_step_of_the_critic_that_is_not_finite_is_skipped_and_counted(tmp_path):
    folder, samples = make_model(tmp_path), rewarded(make_samples(seed=12))
    backend = backend_of(folder, critic={"only_steps": 9}, max_nonfinite_steps=1)
    broken = [but(s, reward=1e30) for s in samples]  # its square is not finite in fp32
    before = backend._critic.model.flat.master.clone()
    assert backend.train(batch_of(broken)).critic.value_skipped_nonfinite == 1
    assert torch.equal(backend._critic.model.flat.master, before)
    with pytest.raises(TrainError, match="the critic: 2 optimizer steps in a row"):
        backend.train(batch_of(broken, 1))


def test_a_critic_gives_its_memory_back_with_its_policy(tmp_path):
    """Between steps both are away; what is trained has the bits of a trainer that stays."""
    folder = make_model(tmp_path / "model")
    settings = with_critic(folder)
    stays, goes = (LocalBackend(s) for s in (settings, replace(settings, offload=tmp_path / "kept")))
    for step in range(3):
        goes.offload()
        assert goes._critic.model.flat.away and goes._critic.model.flat.master.untyped_storage().nbytes() == 0
        goes.onload()
        batch = batch_of(rewarded(make_samples(seed=step)), step)
        assert goes.train(batch).critic.value_loss == stays.train(batch).critic.value_loss
    for a, b in ((goes._flat, stays._flat), (goes._critic.model.flat, stays._critic.model.flat)):
        assert torch.equal(a.master, b.master) and torch.equal(a.exp_avg_sq, b.exp_avg_sq)
