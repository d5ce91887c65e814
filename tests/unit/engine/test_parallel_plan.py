"""How tensors are divided over ranks: the pieces cover each tensor once, and what does not divide is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine_models import KINDS, config
from turnout.core.errors import ConfigError, InvariantBroken, ModelError
from turnout.engine.core import EngineCore
from turnout.engine.settings import EngineSettings
from turnout.engine.storage import ModuleStorage
from turnout.weights.map_rules import Place, local_name, piece

SPLITS = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)]


def specs_of(kind: str):
    with torch.device("meta"):
        return ModuleStorage(AutoModelForCausalLM.from_config(config(kind, num_key_value_heads=4))).specs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tp", "ep"), SPLITS)
def test_the_pieces_of_all_ranks_cover_each_tensor_once(kind, tp, ep):
    if kind != "qwen3_moe" and ep > 1:
        ep = 1
    held = [0] * tp
    for name, spec in specs_of(kind).items():
        covered = np.zeros(spec.shape, np.int64)
        for rank in range(tp):
            part = piece(name, spec.shape, Place(rank, tp, ep, 8 if kind == "qwen3_moe" else 0))
            if part is None:
                continue
            index = [slice(None)] * len(spec.shape)
            if part.axis is not None:
                index[part.axis] = slice(part.first, part.first + part.count)
            covered[tuple(index)] += 1
            held[rank] += int(np.prod(part.shape(spec.shape)))
        assert covered.min() == covered.max()  # everywhere as often
        assert covered.max() == 1 or (covered.max() == tp and ("norm" in name or "mlp.gate." in name))
    whole = sum(int(np.prod(spec.shape)) for spec in specs_of(kind).values())
    assert max(held) <= 1.05 * whole / tp and max(held) == min(held)


def test_experts_are_numbered_anew_in_each_group():
    place = Place(3, 4, 2, 8)
    assert (place.expert_tp, place.experts_here, place.first_expert) == (2, 4, 4)
    name = "model.layers.0.mlp.experts.6.up_proj.weight"
    assert local_name(name, place) == "model.layers.0.mlp.experts.2.up_proj.weight"
    assert piece(name, (32, 64), Place(1, 4, 2, 8)) is None
    part = piece(name, (32, 64), place)
    assert part is not None and (part.axis, part.first, part.count) == (0, 16, 16)


def test_a_tensor_without_a_rule_is_an_error():
    with pytest.raises(InvariantBroken, match="novel_proj"):
        piece("model.layers.0.novel_proj.weight", (4, 4), Place(0, 2))


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        ("llama", {"tp_size": 4}, "tp_size = 4.*num_key_value_heads = 2$"),
        ("llama", {"tp_size": 3}, "num_attention_heads = 4, num_key_value_heads = 2, vocab_size = 320$"),
        ("llama", {"tp_size": 2, "ep_size": 2}, "ep_size = 2: the model has no experts"),
        ("qwen3_moe", {"tp_size": 64, "ep_size": 64}, "num_experts = 8"),
    ],
)
def test_a_model_that_does_not_divide_is_refused_with_its_numbers(kind, flags, message, tmp_path):
    config(kind).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"(?m){message}"):
        EngineCore.build(EngineSettings(tmp_path, **flags), lambda request: None)  # before anything starts


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tp_size": 0}, "tp_size = 0"),
        ({"tp_size": 65}, "tp_size = 65"),
        ({"tp_size": 4, "ep_size": 3}, "ep_size = 3: must divide tp_size = 4"),
        ({"ep_size": 0}, "ep_size = 0"),
        ({"rank_timeout_s": 0.0}, "rank_timeout_s"),
        ({"tp_size": 2, "runner": "fused"}, "runner = fused"),
        ({"tp_size": 2, "disaggregation_mode": "decode"}, "disaggregation_mode = decode"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(flags, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        EngineSettings(tmp_path, **flags)
