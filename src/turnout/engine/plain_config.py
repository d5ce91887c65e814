"""config.json of a Llama-like checkpoint as it stands, without transformers, whose reader of configs takes more CPU
time at an engine's start than torch.

Promise: `plain_config` gives each field the value that transformers gives it, or None where the file leaves one
that matters to a default of transformers, or has what only transformers knows: scaled positions, sliding windows,
quantised weights, another kind of model, values of the wrong type.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings",
)  # fmt: skip
WINDOWED = ("qwen2", "qwen3")  # their sliding_window counts only where use_sliding_window is set


@dataclass(frozen=True)
class PlainConfig:
    """Names and meaning are those of transformers."""

    model_type: str
    architectures: list[str] | None
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope_parameters: dict[str, Any]
    eos_token_id: int | list[int] | None


def plain_config(folder: Path) -> PlainConfig | None:
    """None: ask transformers, which also says what is wrong with a file."""
    try:
        row = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(row, dict) or row.get("model_type") not in FAMILY:
        return None
    rope, eos = _rope(row), row.get("eos_token_id", "absent")
    plain = (
        rope is not None
        and all(type(row.get(name)) is int and row[name] > 0 for name in SIZES)
        and row["hidden_size"] % row["num_attention_heads"] == 0
        and type(row.get("head_dim", None if row["model_type"] != "qwen3" else "absent")) in (int, type(None))
        and type(row.get("rms_norm_eps")) is float
        and type(row.get("hidden_act")) is str
        and all(type(row.get(name, False)) is bool for name in ("attention_bias", "mlp_bias"))
        and type(row.get("tie_word_embeddings", False)) is bool
        and (eos is None or type(eos) is int or _all(eos, int))
        and (row.get("architectures") is None or _all(row["architectures"], str))
        and row.get("quantization_config") is None
        and _full_attention(row)
    )
    if not plain or rope is None:
        return None
    return PlainConfig(
        model_type=row["model_type"],
        architectures=row.get("architectures"),
        **{name: row[name] for name in SIZES},
        head_dim=row.get("head_dim") or row["hidden_size"] // row["num_attention_heads"],
        rms_norm_eps=row["rms_norm_eps"],
        hidden_act=row["hidden_act"],
        tie_word_embeddings=row.get("tie_word_embeddings", False),
        attention_bias=row.get("attention_bias", False),
        mlp_bias=row.get("mlp_bias", False),
        rope_parameters=rope,
        eos_token_id=eos,
    )


def _all(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


def _full_attention(row: dict[str, Any]) -> bool:
    """Whether every layer sees all positions; mistral has a window where the file says nothing."""
    layers = row.get("layer_types")
    if layers is not None:
        return _all(layers, str) and set(layers) == {"full_attention"} and row.get("sliding_window") is None
    if row["model_type"] in WINDOWED and row.get("use_sliding_window", False) is False:
        return True
    return row.get("sliding_window", 0 if row["model_type"] == "mistral" else None) is None


def _rope(row: dict[str, Any]) -> dict[str, Any] | None:
    """Positions that turn by `rope_theta` alone, in the newer form; None for any other."""
    if row.get("rope_scaling") is not None or "partial_rotary_factor" in row:
        return None
    rope = row.get("rope_parameters")
    if rope is None:
        rope = {"rope_theta": row.get("rope_theta"), "rope_type": "default"}
    elif "rope_theta" in row:
        return None
    plain = isinstance(rope, dict) and rope.keys() == {"rope_theta", "rope_type"}
    good = plain and rope["rope_type"] == "default" and type(rope["rope_theta"]) in (int, float)
    return rope if good else None
