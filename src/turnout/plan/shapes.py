"""What a model weighs, from its config.json alone: parameters, those a token passes, bytes of its KV. Pure.

Families whose layers are attention and a gated MLP (Llama, Qwen, Mistral and their mixtures of experts) are counted
to within their norms; others raise ConfigError rather than be counted wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnout.core.errors import ConfigError, Fault

NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
UNKNOWN = (
    "kv_lora_rank",
    "ssm_cfg",
    "mamba_d_state",
    "n_embd",
)  # attention or layers that are not counted here
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
OPTIONAL = ("num_key_value_heads", "head_dim", "moe_intermediate_size", "num_experts_per_tok", *EXPERTS)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one model; `experts` 0: dense. `inner` is the width of one MLP, that of one expert in a mixture."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    experts: int = 0
    used: int = 0

    @property
    def _attention(self) -> int:
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def _mlp(self) -> int:
        return 3 * self.hidden * self.inner

    @property
    def _embeddings(self) -> int:
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def params(self) -> int:
        """Parameters, norms among them."""
        router = self.experts * self.hidden
        layer = self._attention + self._mlp * max(1, self.experts) + router + 2 * self.hidden
        return self.layers * layer + self._embeddings + self.hidden

    @property
    def active(self) -> int:
        """Parameters that a token is multiplied with: no embedding table, and of experts those in use."""
        layer = self._attention + self._mlp * (self.used if self.experts else 1)
        return self.layers * layer + self.vocab * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values in 16 bits."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    @property
    def layer_params(self) -> int:
        """Of the largest unit that a sharded trainer gathers at once: a layer, or the embeddings."""
        layer = self._attention + self._mlp * max(1, self.experts)
        return max(layer, self.vocab * self.hidden)

    def activation_bytes(self, checkpointing: bool) -> int:
        """Of one token in training: all inputs of its products in 16 bits; with checkpointing each layer's input,
        and one layer whole."""
        width = 2 * (6 * self.hidden + 2 * (self.heads + self.kv_heads) * self.head_dim)
        whole = width + 2 * 4 * self.inner * (self.used if self.experts else 1)
        return self.layers * 2 * self.hidden + whole if checkpointing else self.layers * whole


def shape_of(config: object, where: str) -> ModelShape:
    """Reads a config.json; raises ConfigError for what it lacks or what is not counted here."""
    inner_config = config.get("text_config") if isinstance(config, Mapping) else None
    if not isinstance(config, Mapping) or not isinstance(inner_config, Mapping | None):
        raise ConfigError(Fault(where, "", "is no model's config.json: not a mapping"))
    row: dict[str, Any] = {**config, **(inner_config or {})}
    faults = [
        Fault(where, name, "layers of this kind are not counted by the planner", "plan with a dense model")
        for name in UNKNOWN
        if row.get(name) is not None
    ]
    for name in (*NEEDED, *(name for name in OPTIONAL if row.get(name))):
        value = row.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            faults.append(Fault(where, f"{name} {value}", "needs a whole number above 0"))
    if not faults and not row.get("head_dim") and row["num_attention_heads"] > row["hidden_size"]:
        faults.append(
            Fault(where, f"num_attention_heads {row['num_attention_heads']}", "is above hidden_size")
        )
    if faults:
        raise ConfigError(faults)
    experts = next((int(row[name]) for name in EXPERTS if row.get(name)), 0)
    inner = row.get("moe_intermediate_size") if experts else None
    heads = row["num_attention_heads"]
    return ModelShape(
        layers=row["num_hidden_layers"],
        hidden=row["hidden_size"],
        inner=int(inner or row["intermediate_size"]),
        heads=heads,
        kv_heads=int(row.get("num_key_value_heads") or heads),
        head_dim=int(row.get("head_dim") or row["hidden_size"] // heads),
        vocab=row["vocab_size"],
        tied=bool(row.get("tie_word_embeddings", False)),
        experts=experts,
        used=int(row.get("num_experts_per_tok") or 0),
    )
