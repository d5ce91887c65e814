"""What a train step takes: with a vocabulary of 150k words no matrix of tokens by vocabulary, of whatever type."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.train_models import batch_of, settings_for
from turnout.core.types import TrainSample
from turnout.train.local import LocalBackend

VOCABULARY = 151_936  # of Qwen3
FEW, MANY = 64, 1088
HALF_MATRIX = (MANY - FEW) * VOCABULARY * 2  # in bf16: 311 MB


def peak_bytes(work) -> int:
    """The highest resident set while `work` runs, as the kernel counts it."""
    Path("/proc/self/clear_refs").write_text("5")
    work()
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def batch(tokens: int):
    samples = [
        TrainSample("g", (1, 2, 3), (7,) * (tokens // 4), (-12.0,) * (tokens // 4), (1,) * (tokens // 4),
                    (sign,) * (tokens // 4))
        for sign in (1.0, -1.0, 0.5, -0.5)
    ]  # fmt: skip
    return batch_of(samples)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
def test_the_peak_does_not_grow_with_vocabulary_times_tokens(tmp_path, entropy_coef):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    backend = LocalBackend(settings_for(tmp_path, head_chunk_tokens=64, entropy_coef=entropy_coef))
    backend.train(batch(FEW))  # what a first step allocates for good
    few = peak_bytes(lambda: backend.train(batch(FEW)))
    many = peak_bytes(lambda: backend.train(batch(MANY)))
    assert many - few < HALF_MATRIX / 4, f"{(many - few) / 1e6:.0f} MB more for {MANY - FEW} more tokens"
