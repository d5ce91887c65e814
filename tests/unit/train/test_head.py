from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from turnout.engine.sampler import Draw, sample
from turnout.protocol.sglang import SamplingParams
from turnout.train import head
from turnout.train.head import HeadOptions, chunked_logprobs
from turnout.train.parameters import GradientSlot


def plain(hidden, weight, targets, temperature):
    logp = torch.log_softmax(hidden @ weight.t() / temperature, -1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(1)


def inputs(tokens, words, size, dtype=torch.float32, scale=1.0):
    torch.manual_seed(tokens * words)
    hidden = (torch.randn(tokens, size) * scale).to(dtype).requires_grad_()
    weight = torch.randn(words, size).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(words, (tokens,)), torch.randn(tokens)


@pytest.mark.parametrize(
    ("tokens", "words", "chunk"), [(37, 9001, 8), (5, 50, 512), (1, 4096, 1), (16, 4097, 16)]
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("slotted", [True, False])
def test_values_and_gradients_equal_the_full_matrix(tokens, words, chunk, temperature, slotted):
    hidden, weight, targets, upstream = inputs(tokens, words, 24)
    expected, expected_entropy = plain(hidden, weight, targets, temperature)
    wanted = torch.autograd.grad((expected * upstream).sum(), (hidden, weight))
    slot = GradientSlot(torch.full(weight.shape, 7.0)) if slotted else None  # left over: must be overwritten
    found, entropy = chunked_logprobs(hidden, weight, targets, HeadOptions(temperature, chunk), slot)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-5, atol=1e-4)
    (found * upstream).sum().backward()
    torch.testing.assert_close(hidden.grad, wanted[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(slot.buffer if slot else weight.grad, wanted[1], rtol=1e-4, atol=1e-5)
    assert slot is None or weight.grad is None


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("both", [True, False])
def test_the_entropy_has_the_gradient_of_the_full_matrix(temperature, both):
    hidden, weight, targets, upstream = inputs(9, 9001, 24)
    other = torch.randn(9) * both

    def objective(logprobs, entropy):
        return (entropy * upstream).sum() + ((logprobs * other).sum() if both else 0.0)

    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    wanted = torch.autograd.grad(objective(*plain(*wide, targets, temperature)), wide)
    slot = GradientSlot(torch.full(weight.shape, 7.0))
    objective(*chunked_logprobs(hidden, weight, targets, HeadOptions(temperature, 4), slot)).backward()
    torch.testing.assert_close(hidden.grad.double(), wanted[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(slot.buffer.double(), wanted[1], rtol=1e-4, atol=1e-5)


def test_gradcheck_of_both_outputs(monkeypatch):
    monkeypatch.setattr(head, "VOCABULARY_BLOCK", 4)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # the same operations in float64
    zeros, empty, full = torch.zeros, torch.empty, torch.full
    for name, make in (("zeros", zeros), ("empty", empty), ("full", full)):
        monkeypatch.setattr(torch, name, partial(wide_maker, make))
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 3).double().requires_grad_(), torch.randn(11, 3).double().requires_grad_()
    targets = torch.randint(11, (5,))
    assert torch.autograd.gradcheck(
        lambda h, w: chunked_logprobs(h, w, targets, HeadOptions(0.7, 2)), (hidden, weight)
    )


def wide_maker(make, *args, **kwargs):
    return make(*args, **(kwargs | {"dtype": torch.float64}))


def test_a_second_backward_adds_to_the_slot():
    hidden, weight, targets, upstream = inputs(6, 300, 8)
    slot = GradientSlot(torch.zeros(weight.shape))
    for _ in range(2):
        (chunked_logprobs(hidden, weight, targets, HeadOptions(), slot)[0] * upstream).sum().backward()
    (wanted,) = torch.autograd.grad((plain(hidden, weight, targets, 1.0)[0] * upstream).sum(), (weight,))
    torch.testing.assert_close(slot.buffer, 2 * wanted, rtol=1e-4, atol=1e-5)


def test_extreme_logits_stay_finite():
    hidden, weight, targets, _ = inputs(8, 5000, 16, scale=300.0)
    found, entropy = chunked_logprobs(hidden, weight, targets, HeadOptions())
    expected, _ = plain(hidden.double(), weight.double(), targets, 1.0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-2)
    assert torch.isfinite(entropy).all() and (entropy > -1e-3).all()


def test_bf16_is_within_rounding_of_the_same_products_in_fp32():
    hidden, weight, targets, upstream = inputs(20, 6000, 32, torch.bfloat16)
    found, _ = chunked_logprobs(hidden, weight, targets, HeadOptions())
    expected, _ = plain(hidden.float(), weight.float(), targets, 1.0)
    assert float((found - expected).abs().max()) < 0.15  # logits near 20 have a spacing of 0.125
    (found * upstream).sum().backward()
    wanted = torch.autograd.grad((expected * upstream).sum(), (hidden, weight))
    for grad, full in zip((hidden.grad, weight.grad), wanted):
        assert torch.cosine_similarity(grad.float().flatten(), full.float().flatten(), dim=0) > 0.999


class LargestTensor(TorchDispatchMode):
    """Records the most elements of any tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.element_size())
        return out


def test_no_tensor_of_tokens_by_vocabulary_is_made():
    tokens, words = 4096, 9000
    hidden, weight, targets, _ = inputs(tokens, words, 4)
    slot = GradientSlot(torch.zeros(weight.shape))
    with LargestTensor() as probe:
        found, _ = chunked_logprobs(hidden, weight, targets, HeadOptions(1.0, 64), slot)
        found.sum().backward()
    assert 64 * 4096 <= probe.elements < tokens * words / 50
    with LargestTensor() as control:
        plain(hidden, weight, targets, 1.0)
    assert control.elements == tokens * words


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.0, 2.0])
def test_cfg_13_the_engine_and_the_trainer_divide_the_logits_by_one_temperature(temperature):
    logits = torch.tensor([[2.0, 0.0]]).repeat(20, 1)
    drawn = sample(logits, [Draw(SamplingParams(temperature=temperature), i, i) for i in range(20)])
    targets, options = torch.tensor(drawn.tokens), HeadOptions(temperature, 4)
    found, _ = chunked_logprobs(torch.ones(20, 1), torch.tensor([[2.0], [0.0]]), targets, options)
    assert found.tolist() == pytest.approx(drawn.logprobs, abs=1e-6)
    exact = torch.log_softmax(torch.tensor([2.0, 0.0]).double() / temperature, -1)
    assert drawn.logprobs == pytest.approx(exact[targets].tolist(), abs=1e-6)
