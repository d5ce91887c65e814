"""A real server from start to stop: what it is started with, what it attests, what is left of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang.conftest import Server
from turnout.core.errors import EngineDead
from turnout.core.version import WeightVersion
from turnout.placement.guard import descendants
from turnout.transfer.attest import proved
from turnout.weights.checkpoint_io import read_checkpoint
from turnout.weights.stock_checksums import StockEngine, disagreement, stock_checksums

STOCK = StockEngine("float32", "cpu")


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("sglang_", "sgl_shm_"))}


def test_a_server_starts_proves_its_weights_and_leaves_nothing(sglang_python, model, tmp_path):
    before = segments()
    server = Server(sglang_python, model, tmp_path, key="sesame")
    try:
        family = descendants(server.engine.process.pid)
        assert len(family) >= 3, "the server, its scheduler and its detokenizer"
        assert all(b"sesame" not in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family)
        found = server.do(server.client.attest(60.0))
        expected = stock_checksums(read_checkpoint(model), STOCK)
        assert proved("engine-0", found, WeightVersion(0, 1, "ab" * 16), expected).level == "checksum"
    finally:
        server.stop()
    assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]
    assert not segments() - before


def test_a_vocabulary_that_is_padded_and_a_head_of_its_own(sglang_python, tmp_path):
    """Rows of embedding and head that SGLang adds are zeros, and belong to what it checks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                         bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)  # fmt: skip
    folder = tmp_path / "odd"
    LlamaForCausalLM(config).save_pretrained(folder)
    server = Server(
        sglang_python, folder, tmp_path, arguments={"max-total-tokens": 512, "skip-tokenizer-init": True}
    )
    try:
        found = server.do(server.client.attest(60.0))
    finally:
        server.stop()
    assert disagreement(stock_checksums(read_checkpoint(folder), STOCK), found.checksums) is None


def test_a_start_that_fails_says_why(sglang_python, model, tmp_path):
    with pytest.raises(EngineDead, match="nonsense"):
        Server(sglang_python, model, tmp_path, arguments={"attention-backend": "nonsense"})
