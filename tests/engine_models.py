"""Tiny random models for engine tests: Llama (tied), Qwen3 (untied, biasless, q/k norms), Qwen3-MoE."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCABULARY = 320
COMMON = dict(  # noqa: C408
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.2,
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
KINDS = ("llama", "qwen3", "qwen3_moe")


def config(kind: str, **changes):
    rows = COMMON | changes
    if kind == "llama":
        return LlamaConfig(**(rows | {"tie_word_embeddings": changes.get("tie_word_embeddings", True)}))
    if kind == "qwen3":
        return Qwen3Config(**(rows | {"tie_word_embeddings": changes.get("tie_word_embeddings", False)}))
    if kind == "qwen2":
        return Qwen2Config(**(rows | changes))
    if kind == "mistral":
        return MistralConfig(**(rows | {"sliding_window": None} | changes))
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return Qwen3MoeConfig(**(rows | moe | {"tie_word_embeddings": False} | changes))


def make_model(
    folder: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **changes
) -> Path:
    """Saves a random model; the same arguments give the same weights."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(kind, **changes)).to(dtype)
    model.save_pretrained(folder)
    return folder


def add_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer: ids 3.. are the bytes 0..255, so that any text has ids and stop strings work."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {c: i + 3 for i, c in enumerate(alphabet)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
    return folder
