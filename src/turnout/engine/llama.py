"""Llama-like models (Llama, Mistral, Qwen2, Qwen3) in bf16 through native/llama.c: one call computes one step.

Promises what runner.Forward asks. Against the module of transformers it differs by rounding only: sums, norms,
rotary and the residual stream are float32 here, rounded to bf16 where a product or the cache takes a value.
`refusal` says why a model or machine can't take this path; then the module is run.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from turnout.core.errors import InvariantBroken
from turnout.engine.attention import KvCache
from turnout.engine.packed import DEPTH, TILE, PackedStorage, blocks, depth_blocks
from turnout.engine.plain_config import FAMILY
from turnout.engine.settings import UNQUANTISED, EngineSettings
from turnout.engine.shape import ModelShape
from turnout.engine.step import StepInput
from turnout.native.loader import library, path_taken

SPARE_ROWS = 32  # products read whole tiles of rows


def refusal(config: Any, settings: EngineSettings) -> str | None:
    """Why this model can't be run here; None where it can."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    faults = [
        (settings.dtype != "bfloat16", f"dtype {settings.dtype}"),
        (settings.quantization != UNQUANTISED, f"quantization {settings.quantization}"),
        (config.model_type not in FAMILY, f"model type {config.model_type}"),
        (library() is None, path_taken()),
        (head_dim % TILE != 0, f"head dimension {head_dim} is not a multiple of {TILE}"),
        (
            getattr(config, "hidden_act", "silu") != "silu",
            f"activation {getattr(config, 'hidden_act', None)}",
        ),
        (bool(getattr(config, "mlp_bias", False)), "biases in the MLP"),
        (bool(getattr(config, "attention_bias", False)), "biases in the attention"),
    ]
    return next((reason for wrong, reason in faults if wrong), None)


def kernel() -> str:
    """What the products run on."""
    native = library()
    if native is None:
        return path_taken()
    return "AMX tiles" if native.turnout_products_kernel() else "plain vectors"


class _Packed(ctypes.Structure):
    _fields_ = (("weights", ctypes.c_void_p), ("blocks", ctypes.c_int64), ("depth_blocks", ctypes.c_int64))


class _Layer(ctypes.Structure):
    _fields_ = (
        *[(name, _Packed) for name in ("qkv", "out", "gate_up", "down")],
        *[
            (name, ctypes.c_void_p)
            for name in ("input_norm", "mlp_norm", "qkv_bias", "query_norm", "key_norm")
        ],
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *[(name, ctypes.c_int64) for name in ("layers", "hidden", "inter", "heads", "kv_heads", "head_dim")],
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("layer", ctypes.POINTER(_Layer)),
        ("norm", ctypes.c_void_p),
        ("embedding", ctypes.c_void_p),
        ("embedding_depth", ctypes.c_int64),
        ("rotary", ctypes.c_void_p),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64),
        ("table_width", ctypes.c_int64),
        *[(name, ctypes.c_void_p) for name in ("tokens", "position", "sequence", "table")],
        ("key_pages", ctypes.POINTER(ctypes.c_void_p)),
        ("value_pages", ctypes.POINTER(ctypes.c_void_p)),
        *[(n, ctypes.c_void_p) for n in ("residual", "narrow", "qkv", "attended", "gated", "heads_in")],
    )


class LlamaForward:
    """A runner.Forward over a PackedStorage. Used from one thread."""

    def __init__(self, config: Any, shape: ModelShape, storage: PackedStorage, max_rows: int) -> None:
        self._config, self._shape, self._storage = config, shape, storage
        self._rotary = _rotary_table(config, shape)
        self._generation = -1
        self._model, self._layers, self._head = _Model(), (_Layer * shape.layers)(), _Packed()
        rows, width = max_rows + SPARE_ROWS, (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        queries = shape.heads * shape.head_dim

        def zeros(columns: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros((rows, columns), dtype=dtype)

        self._residual = zeros(config.hidden_size, torch.float32)
        self._qkv = zeros(width, torch.float32)
        self._narrow = zeros(depth_blocks(config.hidden_size) * DEPTH, torch.bfloat16)
        self._attended = zeros(depth_blocks(queries) * DEPTH, torch.bfloat16)
        self._gated = zeros(depth_blocks(config.intermediate_size) * DEPTH, torch.bfloat16)
        self._heads_in = zeros(width, torch.bfloat16)

    def hidden(self, step: StepInput, table: Tensor, cache: KvCache) -> Tensor:
        """See runner.Forward. The result is overwritten by the next call."""
        self._refresh()
        rows = len(step.tokens)
        pointers = ctypes.c_void_p * self._shape.layers
        call = _Step(
            rows,
            table.shape[1],
            step.tokens.ctypes.data,
            step.positions.ctypes.data,
            step.slots.ctypes.data,
            table.data_ptr(),
            pointers(*[t.data_ptr() for t in cache.keys]),
            pointers(*[t.data_ptr() for t in cache.values]),
            *[
                t.data_ptr()
                for t in (
                    self._residual,
                    self._narrow,
                    self._qkv,
                    self._attended,
                    self._gated,
                    self._heads_in,
                )
            ],
        )
        native = library()
        if native is None or rows > len(self._residual) - SPARE_ROWS:
            raise InvariantBroken(f"a step of {rows} rows is more than this runner was made for")
        if native.turnout_llama_hidden(ctypes.byref(self._model), ctypes.byref(call)):
            raise MemoryError("no memory for the scores of one step's attention")
        return self._narrow[:rows]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocabulary]."""
        self._refresh()
        rows = len(hidden)
        padded = torch.zeros((-(-rows // SPARE_ROWS) * SPARE_ROWS, hidden.shape[1]), dtype=torch.bfloat16)
        padded[:rows] = hidden
        out = torch.empty((rows, self._shape.vocab_size), dtype=torch.float32)
        native = library()
        assert native is not None
        native.turnout_llama_logits(
            ctypes.byref(self._head),
            ctypes.c_void_p(padded.data_ptr()),
            ctypes.c_int64(rows),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int64(self._shape.vocab_size),
        )
        return out

    def _refresh(self) -> None:
        """Follows the storage to its live buffers after an update."""
        if self._generation == self._storage.generation:
            return
        config, shape = self._config, self._shape
        for index in range(shape.layers):
            self._layers[index] = self._layer(f"layer{index}")
        tied = not self._storage.has("embedding")
        self._head = self._packed("head", config.hidden_size, shape.vocab_size)
        self._model = _Model(
            shape.layers,
            config.hidden_size,
            config.intermediate_size,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            config.rms_norm_eps,
            shape.head_dim**-0.5,
            self._layers,
            self._pointer("norm"),
            self._pointer("head" if tied else "embedding"),
            depth_blocks(config.hidden_size) if tied else 0,
            self._rotary.data_ptr(),
        )
        self._generation = self._storage.generation

    def _layer(self, name: str) -> _Layer:
        config, shape = self._config, self._shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        return _Layer(
            self._packed(f"{name}.qkv", config.hidden_size, queries + 2 * keys),
            self._packed(f"{name}.out", queries, config.hidden_size),
            self._packed(f"{name}.gate_up", config.hidden_size, 2 * blocks(config.intermediate_size) * TILE),
            self._packed(f"{name}.down", config.intermediate_size, config.hidden_size),
            self._pointer(f"{name}.input_layernorm"),
            self._pointer(f"{name}.post_attention_layernorm"),
            *[self._pointer(f"{name}.{part}") for part in ("qkv_bias", "q_norm", "k_norm")],
        )

    def _packed(self, buffer: str, inputs: int, outputs: int) -> _Packed:
        return _Packed(self._storage.live(buffer).data_ptr(), blocks(outputs), depth_blocks(inputs))

    def _pointer(self, buffer: str) -> int | None:
        return self._storage.live(buffer).data_ptr() if self._storage.has(buffer) else None


def _rotary_table(config: Any, shape: ModelShape) -> Tensor:
    """[positions, head_dim] float32: cosines of the first half, then sines, as the model's module gives them."""
    positions = torch.arange(shape.context_length)
    rope = config.rope_parameters
    if rope.keys() <= {"rope_type", "rope_theta"} and rope["rope_type"] == "default":
        even = torch.arange(0, shape.head_dim, 2, dtype=torch.float32)
        angles = positions[:, None].float() * (1.0 / (rope["rope_theta"] ** (even / shape.head_dim)))
        return torch.cat([angles.cos(), angles.sin()], dim=-1)
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow; its module knows the kinds of scaling

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    rotary = type(skeleton.model.rotary_emb)(config)
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32), positions[None])
    half = shape.head_dim // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1).float().contiguous()
