"""The one-pass forms against the model code of transformers, in bf16."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn import Parameter
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from tests.train_models import make_model, make_samples, settings_for
from turnout.core.errors import InvariantBroken, ModelError
from turnout.native.loader import library, path_taken
from turnout.train import fused
from turnout.train.head import HeadOptions, chunked_logprobs
from turnout.train.local import LocalBackend
from turnout.train.native_ops import call
from turnout.train.parameters import AdamW, FlatParameters
from turnout.train.settings import OptimizerSettings

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


@pytest.mark.parametrize("shape", [(1, 1, 8), (13, 3, 64), (40, 9, 32)])
def test_rotary_equals_the_model_code(shape):
    torch.manual_seed(4)
    angles = torch.randn(shape[0], shape[2])  # both halves their own: more than a model uses
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    x, upstream = torch.randn(shape).bfloat16().requires_grad_(), torch.randn(shape).bfloat16()
    found = fused.rotary(x, cos, sin)
    expected = apply_rotary_pos_emb(x[None].transpose(1, 2), x[None].transpose(1, 2), cos[None], sin[None])[0]
    assert torch.equal(found, expected[0].transpose(0, 1))
    wide = x.detach().double().requires_grad_()
    args = [wide[None].transpose(1, 2)] * 2
    exact = apply_rotary_pos_emb(*args, cos[None].double(), sin[None].double())[0][0].transpose(0, 1)
    wanted = grads(exact, upstream.double(), wide)[0]
    torch.testing.assert_close(grads(found, upstream, x)[0].double(), wanted, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    ("prefix", "segments"), [(0, (1,)), (0, (5, 1, 30)), (7, (17,)), (46, (16, 16, 16)), (33, (3, 2))]
)
def test_masked_softmax_equals_torch(prefix, segments):
    torch.manual_seed(5)
    own, scale = sum(segments), 0.125
    starts = torch.tensor([sum(segments[:i]) for i in range(len(segments))])
    first = torch.repeat_interleave(starts, torch.tensor(segments))
    place = torch.arange(own)
    seen = torch.cat(
        [torch.ones(own, prefix), (place[None] >= first[:, None]) & (place[None] <= place[:, None])], 1
    )
    scores = (torch.randn(3, 2 * own, prefix + own) * 8).bfloat16()
    rows, upstream = 3 * 2 * own, torch.randn(scores.shape).bfloat16()
    wide = scores.double().requires_grad_()
    mask = torch.where(seen.bool(), 0.0, float("-inf")).repeat(2, 1)
    exact = torch.softmax(wide * scale + mask, -1)
    weights, gradient = scores.clone(), upstream.clone()
    call("turnout_masked_softmax", weights, first, rows, own, prefix, scale)
    torch.testing.assert_close(weights.double(), exact, rtol=2**-7, atol=1e-6)
    assert torch.equal(weights == 0, exact == 0)
    call("turnout_masked_softmax_backward", weights, gradient, rows, prefix + own, scale)
    wanted = grads(exact, upstream.double(), wide)[0]
    torch.testing.assert_close(gradient.double(), wanted, rtol=2**-6, atol=2**-9)
    scores[1, 0, 0] = float("nan")  # stays visible
    call("turnout_masked_softmax", scores, first, rows, own, prefix, scale)
    assert scores[1, 0].isnan().any() and not scores[0].isnan().any()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy", [True, False])
def test_the_head_in_one_pass_equals_the_full_matrix(temperature, entropy):
    torch.manual_seed(6)
    hidden, weight = torch.randn(37, 32).bfloat16().requires_grad_(), torch.randn(9001, 32).bfloat16()
    targets, ups = torch.randint(9001, (37,)), torch.randn(2, 37)
    weight.requires_grad_()
    found = chunked_logprobs(hidden, weight, targets, HeadOptions(temperature, 16))
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logp = torch.log_softmax((wide[0] @ wide[1].t()).bfloat16().double() / temperature, -1)
    expected = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(1)
    for value, want in zip(found, expected, strict=True):
        torch.testing.assert_close(value.double(), want, rtol=1e-4, atol=1e-3)
    exact = torch.log_softmax(wide[0] @ wide[1].t() / temperature, -1)
    parts = exact.gather(1, targets[:, None])[:, 0], -(exact.exp() * exact).sum(1)
    count = 1 + entropy
    wanted = torch.autograd.grad(sum((p * u).sum() for p, u in zip(parts[:count], ups)), wide)
    (sum((p * u).sum() for p, u in zip(found[:count], ups))).backward()
    for x, want in zip((hidden, weight), wanted, strict=True):
        gap = float((x.grad.double() - want).norm() / want.norm())
        assert gap < 0.02, gap


def test_adamw_in_one_pass_equals_torch():
    torch.manual_seed(7)
    settings = OptimizerSettings(lr=0.01, weight_decay=0.1, clip_grad=1.0)

    def made(native: bool) -> FlatParameters:
        torch.manual_seed(8)
        named = [("a", Parameter(torch.randn(33, 7))), ("b", Parameter(torch.randn(129)))]
        flat = FlatParameters(named, torch.bfloat16)
        optimizer = AdamW(flat, settings)
        for step in range(5):
            flat.grad.copy_(torch.randn(flat.grad.shape, generator=torch.Generator().manual_seed(step)))
            step_of = optimizer._native_step if native else optimizer._torch_step
            step_of(0.01 / (1 + step), 0.3)
        assert optimizer.steps == 5
        return flat

    one, other = made(True), made(False)
    for name in ("master", "exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-5, atol=1e-6)
    assert torch.equal(one.compute, one.master.bfloat16())


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
    monkeypatch.setattr("turnout.train.native_ops.library", lambda: None)
    without = LocalBackend(settings).logprobs(samples)
    gap = max(float(abs(a - b).max()) for a, b in zip(with_them, without, strict=True))
    assert gap < 0.05


def test_only_bf16_models_are_changed(tmp_path):
    folder = make_model(tmp_path, "qwen3")
    norms = 2 * 4 + 1
    assert (
        fused.fuse(LocalBackend(settings_for(folder, dtype="bfloat16"))._model.module, torch.bfloat16)
        == norms + 2 + 2
    )
    assert fused.fuse(LocalBackend(settings_for(folder))._model.module, torch.float32) == 0


def test_a_head_that_is_rotated_in_part_is_never_read_past_its_angles(tmp_path):
    """By name where the model is loaded; where one got past that, before the memory behind the angles is read."""
    folder = make_model(tmp_path / "model")
    model = LocalBackend(settings_for(folder, dtype="bfloat16"))._model.module
    attention = model.model.layers[0].self_attn
    cos = torch.ones(1, 3, attention.head_dim // 2).bfloat16()
    with pytest.raises(InvariantBroken, match="a head of 8 has 4 angles"):
        attention(torch.ones(1, 3, 32).bfloat16(), (cos, cos), None, packed=None)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    (folder / "config.json").write_text(json.dumps(config))
    LocalBackend(settings_for(folder, dtype="bfloat16")).logprobs(make_samples())
    config["rope_parameters"]["partial_rotary_factor"] = 0.5
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"partial_rotary_factor = 0.5: only models that rotate whole heads"):
        LocalBackend(settings_for(folder, dtype="bfloat16"))
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": 7, "rope_parameters": None}))
    with pytest.raises(ModelError, match="head_dim"):
        LocalBackend(settings_for(folder, dtype="bfloat16"))
