"""Tiny random models for tests and for trying out a whole run: hidden 64, two layers, 320 ids, bf16.

Promises: the bytes of the checkpoint depend on kind and seed only (for one release of torch and
transformers); the tokenizer is byte-level, so every text is representable, and the model has 61 more ids than
the tokenizer, as padded vocabularies do.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from turnout.core.errors import Fault, ModelError
from turnout.train.model_tokenizer import BOS_ID, EOS_ID, PAD_ID, byte_tokenizer, save_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Kind = Literal["llama", "llama-untied", "qwen3", "qwen3-untied", "qwen3-moe"]
KINDS: tuple[str, ...] = get_args(Kind)
VOCAB = 320
# Wide enough that next-token distributions differ clearly from uniform and from one another.
_INIT_RANGE = 0.15


def build(folder: Path, kind: str, seed: int) -> None:
    """Writes the checkpoint into an empty folder; ModelError for an unknown kind."""
    if kind not in KINDS:
        raise ModelError(Fault("tiny model", kind, "there is no such kind", f"one of {', '.join(KINDS)}"))
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config(kind), dtype=torch.bfloat16)
    model.generation_config.update(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    model.save_pretrained(folder)
    save_tokenizer(byte_tokenizer(), folder)


def config(kind: str) -> PreTrainedConfig:
    """The configuration of a kind; heads and key-value heads differ so that grouped attention is real."""
    from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig  # noqa: PLC0415

    family, _, variant = kind.partition("-")
    shared: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "initializer_range": _INIT_RANGE,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "tie_word_embeddings": variant == "",
    }
    if family == "llama":
        return LlamaConfig(**shared)
    if variant == "moe":
        return Qwen3MoeConfig(**shared, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    return Qwen3Config(**shared)
