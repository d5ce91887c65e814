"""bf16 products computed in fp32: exactly the rounded fp32 results, forward and backward.

Through DTensors: tests/unit/train/test_sharded.py on a processor without bf16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import turnout.train.products as subject
from tests.train_models import batch_of, make_model, make_samples, settings_for
from turnout.train.local import LocalBackend
from turnout.train.products import products

CPU = torch.device("cpu")


@pytest.fixture
def no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "multiplies_bf16", lambda: False)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_every_form_of_a_product_is_the_rounded_fp32_one(no_bf16: None) -> None:
    a, b, c = drawn(5, 7), drawn(7, 3, seed=1), drawn(5, 3, seed=2)
    wanted = (a.float() @ b.float()).bfloat16()
    rows, experts = drawn(6, 8, seed=3), drawn(2, 8, 16, seed=4)
    out, batch_out = torch.empty(5, 3).bfloat16(), torch.empty(1, 5, 3).bfloat16()
    with products(CPU, torch.bfloat16):
        assert torch.equal(a @ b, wanted)
        assert torch.mm(a, b, out=out) is out
        assert torch.equal(torch.bmm(a[None], b[None])[0], wanted)
        torch.bmm(a[None], b[None], out=batch_out)
        added = torch.addmm(c, a, b)
        scaled = torch.addmm(c, a, b, beta=2, alpha=3)
        grouped = torch._grouped_mm(rows, experts, offs=torch.tensor([2, 6], dtype=torch.int32))
        resized = torch.mm(a, b, out=torch.empty(0).bfloat16())
        linear = torch.nn.functional.linear(a, b.t())
    assert torch.equal(scaled, (2 * c.float() + 3 * (a.float() @ b.float())).bfloat16())
    parts = [rows[:2].float() @ experts[0].float(), rows[2:].float() @ experts[1].float()]
    assert torch.equal(grouped, torch.cat(parts).bfloat16())
    assert resized.shape == wanted.shape
    for found in (out, batch_out[0], linear):
        assert torch.equal(found, wanted)
    assert torch.equal(added, (c.float() + a.float() @ b.float()).bfloat16())


def test_gradients_are_rounded_fp32_products_and_other_dtypes_stay(no_bf16: None) -> None:
    x, w = drawn(4, 6).requires_grad_(), drawn(3, 6, seed=1).requires_grad_()
    with products(CPU, torch.bfloat16):
        y = torch.nn.functional.linear(x, w)
        y.backward(drawn(4, 3, seed=2))
        double = torch.ones(2, 2, dtype=torch.float64) @ torch.ones(2, 2, dtype=torch.float64)
    dy = drawn(4, 3, seed=2).float()
    assert x.grad is not None and torch.equal(x.grad, (dy @ w.detach().float()).bfloat16())
    assert w.grad is not None and torch.equal(w.grad, (dy.t() @ x.detach().float()).bfloat16())
    assert double.dtype == torch.float64


class Seen(TorchDispatchMode):
    """What really runs: below the mode that widens."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "mm" in str(func):
            dtype = next(value.dtype for value in args if isinstance(value, Tensor))
            self.products.append((str(func), dtype))
        return func(*args, **(kwargs or {}))


def test_a_step_multiplies_in_fp32_only(no_bf16: None, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the model code does; the step equals the other one but for rounding."""
    settings = settings_for(make_model(tmp_path, "qwen3_moe", dtype=torch.bfloat16), dtype="bfloat16")
    batch = batch_of(make_samples(seed=1))
    with Seen() as seen:
        widened = LocalBackend(settings).train(batch)
    names = {name for name, _ in seen.products}
    assert {"aten.mm.default", "aten.bmm.default", "aten._grouped_mm.default"} <= names
    assert {dtype for _, dtype in seen.products} == {torch.float32}
    monkeypatch.setattr(subject, "multiplies_bf16", lambda: True)
    with Seen() as seen:
        plain = LocalBackend(settings).train(batch)
    assert torch.bfloat16 in {dtype for _, dtype in seen.products}
    assert widened.loss == pytest.approx(plain.loss, abs=2e-2)
    assert widened.grad_norm == pytest.approx(plain.grad_norm, rel=5e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nothing_is_watched_where_nothing_is_to_change(no_bf16: None, dtype: torch.dtype) -> None:
    assert not isinstance(products(CPU, dtype), subject._Widened)
