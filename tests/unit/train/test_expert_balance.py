"""The balance loss of experts against plain transformers, one sequence at a time and written out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

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
from tests.unit.train.test_replay import EXPERTS, LAYERS, K, forced, recorded
from turnout.core.errors import ConfigError
from turnout.train.expert_balance import ExpertBalance
from turnout.train.local import LocalBackend
from turnout.train.packing import Member, MicroBatch, Unit

COEF = 0.7
OF_RESPONSE = ("response_ids", "logprobs", "loss_mask", "advantages", "lags")


def of_sequence(logits, chosen) -> torch.Tensor:
    """Equations 17 to 20 for one layer: logits [T, E], `chosen` one list of experts for each position."""
    length, total = len(logits), torch.zeros(())
    for expert in range(EXPERTS):
        f = EXPERTS / (K * length) * sum(expert in experts for experts in chosen)
        total = total + f * sum(row.softmax(-1)[expert] for row in logits) / length
    return total


def of_sample(model, sample) -> list[torch.Tensor]:
    """By layer, of all positions but the last; the recorded experts where there are any."""
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])[:, :-1]
    routers = model(ids, output_router_logits=True).router_logits
    chosen = [logits.topk(K, -1).indices for logits in routers]
    if sample.routed:
        rows = np.frombuffer(sample.routed, np.int16).reshape(-1, LAYERS, K).astype(np.int64)
        chosen = [torch.from_numpy(rows[:, layer]) for layer in range(LAYERS)]
    return [of_sequence(logits, c.tolist()) for logits, c in zip(routers, chosen, strict=True)]


def reference(folder, samples, settings):
    """Loss, gradients, and the balance's mean over sequences and layers."""
    model, balance, logprobs = reference_model(folder), torch.zeros(()), []
    for sample in samples:
        forced(model, sample)
        balance = balance + sum(of_sample(model, sample)) / len(samples)
        logprobs.append(reference_logprobs(model, sample))
    loss = reference_loss(logprobs, samples, settings.loss) + settings.loss.balance_coef * balance
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}, balance.item() / LAYERS


def ragged():
    """Groups with a shared prompt, one sample without an advantage, one of one token, one all but masked."""
    first, second, third, *rest = make_samples(seed=11)
    first = replace(first, advantages=(0.0,) * len(first.advantages))
    second = replace(second, **{name: getattr(second, name)[:1] for name in OF_RESPONSE})
    third = replace(third, loss_mask=(1, *(0,) * (len(third.loss_mask) - 1)))
    return (first, second, third, *rest)


@pytest.fixture
def folder(tmp_path):
    return make_model(tmp_path, "qwen3_moe")


@pytest.mark.parametrize("budget", [20, 33, 4096])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_gradients_equal_the_reference_for_any_packing(folder, budget, checkpointing):
    settings = settings_for(
        folder,
        balance_coef=COEF,
        max_tokens_per_micro_batch=budget,
        gradient_checkpointing=checkpointing,
    )
    loss, grads = gradients(backend := LocalBackend(settings), ragged())
    expected, slow, balance = reference(folder, ragged(), settings)
    assert loss == pytest.approx(expected, rel=1e-5)
    for name, grad in slow.items():
        torch.testing.assert_close(grads[name], grad, rtol=2e-4, atol=2e-6, msg=name)
    backend._optimizer.step = lambda lr, norm: None
    report = backend.train(batch_of(ragged()))  # of this step alone
    assert report.expert_balance_loss == pytest.approx(balance, rel=1e-5)
    assert backend._balance._kept is None, "layers that are computed again keep no graph alive"
    _, without = gradients(LocalBackend(settings_for(folder)), ragged())
    assert not torch.allclose(without[gate := "model.layers.0.mlp.gate.weight"], slow[gate], rtol=0.1)


def test_a_shared_prompt_counts_in_each_sequence_as_if_it_were_its_own(folder):
    samples = [replace(s, prompt_ids=tuple(range(20))) for s in make_samples(seed=2, groups=1, members=4)]
    settings = settings_for(folder, balance_coef=COEF)
    together, apart = LocalBackend(settings), LocalBackend(replace(settings, max_tokens_per_micro_batch=28))
    samples = [replace(s, **{name: (getattr(s, name) * 8)[:8] for name in OF_RESPONSE}) for s in samples]
    plans = [[len(u.members) for m in b._plan(samples, range(4)) for u in m.units] for b in (together, apart)]
    assert plans == [[4], [1, 1, 1, 1]]
    (loss, grads), (lone, alone) = gradients(together, samples), gradients(apart, samples)
    assert loss == pytest.approx(lone, rel=1e-5)
    for name, grad in alone.items():
        torch.testing.assert_close(grads[name], grad, rtol=2e-4, atol=2e-6, msg=name)


def test_a_step_of_several_optimizer_steps_means_over_the_sequences_of_each(folder):
    samples = make_samples(seed=13, groups=3, members=2)
    settings = settings_for(folder, balance_coef=COEF, samples_per_optimizer_step=2, lr=0.0)
    report = LocalBackend(settings).train(batch_of(samples))
    parts = [reference(folder, samples[i : i + 2], settings) for i in (0, 2, 4)]
    assert report.loss == pytest.approx(np.mean([loss for loss, _, _ in parts]), rel=1e-5)
    assert report.expert_balance_loss == pytest.approx(np.mean([b for _, _, b in parts]), rel=1e-5)


@pytest.mark.parametrize("budget", [24, 4096])
def test_recorded_experts_are_what_is_counted(folder, budget):
    samples = recorded(folder, make_samples(seed=5))
    settings = settings_for(folder, balance_coef=COEF, max_tokens_per_micro_batch=budget)
    backend = LocalBackend(replace(settings, gradient_checkpointing=True))
    loss, grads = gradients(backend, samples)
    expected, slow, balance = reference(folder, samples, settings)
    assert loss == pytest.approx(expected, rel=1e-5)
    for name, grad in slow.items():
        torch.testing.assert_close(grads[name], grad, rtol=2e-4, atol=2e-6, msg=name)
    own = [replace(s, routed=b"") for s in samples]
    assert balance != pytest.approx(reference(folder, own, settings)[2], rel=1e-3)


@pytest.mark.parametrize("budget", [24, 4096])
def test_with_coefficient_0_it_is_told_and_a_step_has_the_same_bits(folder, budget):
    found = []
    for coef in (None, 0.0):
        settings = settings_for(folder, balance_coef=coef, max_tokens_per_micro_batch=budget)
        backend = LocalBackend(settings)
        report = backend.train(batch_of(ragged()))
        found.append((report, {t.name: t.bits.copy() for t in backend.export()}))
    (off, weights), (measured, same) = found
    assert (off.loss, off.grad_norm) == (measured.loss, measured.grad_norm)
    assert all(np.array_equal(bits, same[name]) for name, bits in weights.items())
    assert off.expert_balance_loss == 0.0
    assert measured.expert_balance_loss == pytest.approx(reference(folder, ragged(), settings)[2], rel=1e-5)


def test_transformers_says_the_same_of_one_sequence_and_layer(folder):
    """Its own divides by positions, not by positions times experts of each, and takes all layers together."""
    model, sample = reference_model(folder), make_samples(seed=3, longest=20)[0]
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])[:, :-1]
    routers = model(ids, output_router_logits=True).router_logits
    theirs = sum(load_balancing_loss_func((logits,), EXPERTS, K) for logits in routers) / K
    report = LocalBackend(settings_for(folder, balance_coef=0.0)).train(batch_of([sample]))
    assert report.expert_balance_loss * LAYERS == pytest.approx(theirs.item(), rel=1e-5)


class Layer(torch.nn.Module):
    """A router that says what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = torch.nn.Module()
        self.mlp.gate = torch.nn.Identity()


def by_hand(logits, chosen, micro) -> float:
    layers = torch.nn.ModuleList([Layer()])
    balance = ExpertBalance(layers, 1.0)
    balance.begin()
    layers[0].mlp.gate((torch.tensor(logits), None, torch.tensor(chosen)))
    return float(balance.of(micro))


def test_numbers_by_hand():
    """An even spread is 1, all on one of two experts is 2; of two sequences that share a position, each is asked
    whether it is even."""
    alone = MicroBatch((Unit(1, (Member(0, 2),)),))
    even = [[0.0, 0.0], [0.0, 0.0]]
    sure = [[30.0, -30.0], [30.0, -30.0]]
    assert by_hand(even, [[0], [1]], alone) == pytest.approx(1.0)
    assert by_hand(sure, [[0], [0]], alone) == pytest.approx(2.0)
    shared = MicroBatch((Unit(1, (Member(0, 2), Member(1, 2))),))
    split = [[30.0, -30.0], [-30.0, 30.0], [30.0, -30.0]]
    assert by_hand(split, [[0], [1], [0]], shared) == pytest.approx(1.0 + 2.0)
    assert by_hand(even[:1], [[0]], MicroBatch(())) == 0.0


def test_a_model_without_experts_is_refused(tmp_path):
    settings = settings_for(make_model(tmp_path), balance_coef=0.001)
    with pytest.raises(
        ConfigError, match="--moe-router-load-balancing-type = seq_aux_loss: the model has no exp"
    ):
        LocalBackend(settings)
    (fault,) = replace(settings, loss=replace(settings.loss, balance_coef=-1.0)).faults()
    assert fault.where == "--moe-aux-loss-coeff"
