"""The one-pass forms against the model code of transformers, in bf16."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.train_models import make_model, make_samples, settings_for
from turnout.native.loader import library, path_taken
from turnout.train import fused
from turnout.train.local import LocalBackend

pytestmark = pytest.mark.skipif(library() is None, reason=path_taken())


def grads(out, upstream, *ins):
    return torch.autograd.grad(out, ins, grad_outputs=upstream)


@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 37, 576), (3, 5, 4, 64), (1, 3, 33)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
def test_rms_norm_equals_the_model_code(shape, scale):
    torch.manual_seed(1)
    x = (torch.randn(shape) * scale).bfloat16().requires_grad_()
    norm = LlamaRMSNorm(shape[-1], 1e-6).bfloat16()
    norm.weight.data = (1 + 0.3 * torch.randn(shape[-1])).bfloat16()
    upstream = torch.randn(shape).bfloat16()
    found, expected = fused.rms_norm(x, norm.weight, 1e-6), norm(x)
    different = found != expected  # the order of a sum may move a value over the edge of a rounding
    assert different.float().mean() < 0.02
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)
    wide = x.detach().double().requires_grad_()
    weight = norm.weight.detach().double().requires_grad_()
    exact = weight * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    wanted = grads(exact, upstream.double(), wide, weight)
    for grad, want in zip(grads(found, upstream, x, norm.weight), wanted):
        torch.testing.assert_close(grad.double(), want, rtol=2**-7, atol=2**-8 * float(want.abs().max()))


def test_silu_gate_equals_the_model_code():
    torch.manual_seed(2)
    values = torch.cat([torch.randn(4000) * 4, torch.linspace(-120, 120, 481), torch.tensor([0.0, -0.0])])
    gate = values.bfloat16().requires_grad_()
    up, upstream = torch.randn(len(gate)).bfloat16().requires_grad_(), torch.randn(len(gate)).bfloat16()
    found, expected = fused.silu_gate(gate, up), F.silu(gate) * up
    assert (found != expected)[gate.abs() < 85].float().mean() < 0.01
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-30)  # below -88 the model code says 0
    g, u = gate.detach().double().requires_grad_(), up.detach().double().requires_grad_()
    wanted = grads(F.silu(g) * u, upstream.double(), g, u)
    for grad, want in zip(grads(found, upstream, gate, up), wanted):
        torch.testing.assert_close(grad.double(), want, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_stay_visible(bad):
    x = torch.ones(2, 16).bfloat16()
    x[0, 3] = bad
    out = fused.rms_norm(x, torch.ones(16).bfloat16(), 1e-6)
    assert not torch.isfinite(out[0]).all() and torch.isfinite(out[1]).all()
    gated = fused.silu_gate(x, torch.ones(2, 16).bfloat16())
    assert torch.equal(gated.isfinite(), F.silu(x).isfinite())


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_a_bf16_model_with_and_without_them_gives_the_same_log_probs(tmp_path, kind, monkeypatch):
    folder, samples = make_model(tmp_path, kind, dtype=torch.bfloat16), make_samples(seed=70)
    settings = settings_for(folder, dtype="bfloat16")
    with_them = LocalBackend(settings).logprobs(samples)
    monkeypatch.setattr("turnout.train.fused.library", lambda: None)
    without = LocalBackend(settings).logprobs(samples)
    gap = max(float(abs(a - b).max()) for a, b in zip(with_them, without, strict=True))
    assert gap < 0.05


def test_only_bf16_models_are_changed(tmp_path):
    folder = make_model(tmp_path, "qwen3")
    norms = 2 * 4 + 1
    assert (
        fused.fuse(LocalBackend(settings_for(folder, dtype="bfloat16"))._model.module, torch.bfloat16)
        == norms + 2
    )
    assert fused.fuse(LocalBackend(settings_for(folder))._model.module, torch.float32) == 0
