"""Small checkpoints of host tensors for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from turnout.weights.tensors import ITEM_BYTES, UNSIGNED, HostTensor, converted

ODD_SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "empty": (0, 4),
    "b": (3,),
    "a/é\u2028.weight": (2, 5),
}


def host(name: str, dtype: str = "F32", shape: tuple[int, ...] = (2, 3), seed: int = 0) -> HostTensor:
    """Random bits, so NaN payloads, -0.0 and subnormals among them."""
    count = int(np.prod(shape, dtype=np.int64))
    raw = np.random.default_rng([seed, len(name)]).integers(0, 256, count * ITEM_BYTES[dtype], np.uint8)
    if dtype == "BOOL":
        raw &= 1
    return HostTensor(name, dtype, shape, raw.view(UNSIGNED[ITEM_BYTES[dtype]]))


def model(seed: int = 0) -> list[HostTensor]:
    """A few tensors of several dtypes and shapes, about 300 bytes."""
    named = [host(f"{dtype}.{name}", dtype, shape, seed)
             for dtype in ("BF16", "F32", "U8") for name, shape in ODD_SHAPES.items()]  # fmt: skip
    return [*named, host("head", "BF16", (8, 8), seed)]


def finite(name: str, dtype: str, shape: tuple[int, ...], seed: int) -> HostTensor:
    """Normal values, none of them NaN or infinite; BF16 or F32."""
    values = np.random.default_rng([seed, len(name)]).standard_normal(shape).astype(np.float32)
    return converted(HostTensor(name, "F32", shape, values.reshape(-1).view(np.uint32)), dtype)


def finite_model(seed: int = 0) -> list[HostTensor]:
    """Tensors as a trainer exports them: bf16, a float32 router, a scalar, an empty one; 553 elements."""
    shapes = {
        "embed": ("BF16", (32, 16)),
        "router": ("F32", (4, 8)),
        "norm": ("BF16", (8,)),
        "scalar": ("BF16", ()),
        "empty": ("F32", (0, 4)),
    }
    return [finite(name, dtype, shape, seed) for name, (dtype, shape) in shapes.items()]


def touched(tensors: list[HostTensor], name: str, at: int, bits: int) -> list[HostTensor]:
    """Copies, with one element of one tensor replaced."""
    copies = [HostTensor(t.name, t.dtype, t.shape, t.bits.copy()) for t in tensors]
    next(t for t in copies if t.name == name).bits[at] = bits
    return copies


def as_rows(tensors: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """By name, comparable bit for bit."""
    return {t.name: (t.dtype, t.shape, t.bits.tobytes()) for t in tensors}


def raw_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file with any header: bytes as they are, anything else as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def assets(folder: Path) -> Path:
    """The rest of a checkpoint: config and tokenizer, and weights that are not to be copied."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "toy"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"other weights")
    (folder / "sub").mkdir()
    return folder
