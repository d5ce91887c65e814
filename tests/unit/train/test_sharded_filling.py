"""Parameters that a rank reads layer by layer: of what it has read it keeps only what its share keeps."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import Linear, Parameter

from turnout.train.sharded_model import _Filling


def test_what_was_read_for_a_layer_is_held_by_nobody_else() -> None:
    with torch.device("meta"):
        layers = torch.nn.Sequential(Linear(4, 4, bias=False), Linear(4, 4, bias=False))
    read: list[weakref.ref[torch.Tensor]] = []

    def one(*_: Any) -> torch.Tensor:
        tensor = torch.ones(4, 4)
        read.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    shapes = {name: tuple(p.shape) for name, p in layers.named_parameters()}
    model: Any = SimpleNamespace(mesh=SimpleNamespace(experts=None), shapes=shapes, divided=frozenset())
    source: Any = SimpleNamespace(read=one)
    filling = _Filling(layers, model, source)
    for layer in layers:
        filling(layer)
        assert layer.weight.device.type == "cpu"
        layer.weight = Parameter(layer.weight.detach()[:1].clone())  # as FSDP does: its share in place of all
    assert len(read) == 2
    assert [ref() for ref in read] == [None, None]
