"""The reader of plain configs says what transformers says, or nothing."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from transformers import AutoConfig

from tests.engine_models import config
from turnout.engine.plain_config import PlainConfig, plain_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 3, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "rope_theta": 100000.0, "rope_scaling": None,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": [2, 7], "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN = LLAMA | {"sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 2, "head_dim": 128}


def written(folder, row):
    (folder / "config.json").write_text(json.dumps(row))
    return folder


@pytest.mark.parametrize(
    "row",
    [
        LLAMA,
        LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 32},
        LLAMA | {"model_type": "mistral", "sliding_window": None, "head_dim": None},
        QWEN | {"model_type": "qwen2", "eos_token_id": None},
        QWEN | {"model_type": "qwen3", "tie_word_embeddings": True, "rope_theta": 1000000},
        QWEN | {"model_type": "qwen3", "sliding_window": None, "layer_types": ["full_attention"] * 3},
        *[config(kind).to_dict() for kind in ("llama", "mistral", "qwen2", "qwen3")],
    ],
    ids=lambda row: row["model_type"],
)
def test_fields_are_those_of_transformers(row, tmp_path):
    plain, theirs = plain_config(written(tmp_path, row)), AutoConfig.from_pretrained(tmp_path)
    assert plain is not None
    for field in fields(PlainConfig):
        ours = getattr(plain, field.name)
        absent = (
            None if field.name == "architectures" else False
        )  # kinds without biases have no field for them
        assert ours == getattr(theirs, field.name, ours if field.name == "head_dim" else absent), field.name


@pytest.mark.parametrize(
    ("changes", "without"),
    [
        ({"model_type": "gemma"}, ""),
        ({"model_type": "qwen3_moe"}, ""),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ""),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, ""),
        ({"partial_rotary_factor": 0.5}, ""),
        ({"quantization_config": {"bits": 4}}, ""),
        ({"sliding_window": 4096}, ""),
        ({"model_type": "mistral"}, ""),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096}, ""),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, ""),
        ({"model_type": "qwen3"}, "head_dim"),
        ({"hidden_size": 577}, ""),
        ({"num_hidden_layers": "3"}, ""),
        ({"tie_word_embeddings": 1}, ""),
        *[
            ({}, name)
            for name in ("rope_theta", "eos_token_id", "rms_norm_eps", "num_key_value_heads", "hidden_act")
        ],
    ],
)
def test_what_a_file_leaves_open_is_left_to_transformers(changes, without, tmp_path):
    row = {name: value for name, value in (LLAMA | changes).items() if name != without}
    assert plain_config(written(tmp_path, row)) is None


def test_no_file_and_no_json_are_left_to_transformers(tmp_path):
    assert plain_config(tmp_path) is None
    (tmp_path / "config.json").write_text("{")
    assert plain_config(tmp_path) is None
