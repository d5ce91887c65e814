"""What the weights checker of a stock SGLang must report of a version, computed from the trainer's values.

SGLang 0.5.23 reports one hash of its bytes for each parameter, under its own names. It stacks query, key and value,
gate and up, and the experts of a layer into one parameter each, pads vocabularies to a multiple of 64 rows with
zeros, and keeps a tied head only once. Promises: tensors may come in any order, each is hashed once and let go as
soon as those before it in its parameter have come; nothing is concluded about a parameter of which not every part
came. For one rank, without quantisation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from turnout.core.errors import WeightError
from turnout.weights.stock_hash import HASHES, TensorHash
from turnout.weights.tensors import HostTensor, narrowed

VOCABULARY_ROWS = 64
DTYPES = {"float32": "F32", "bfloat16": "BF16"}
_STACKED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
            "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}  # fmt: skip
_PARTS = {"qkv_proj": 3, "gate_up_proj": 2}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_LINEAR = re.compile(r"(.*\.)(q_proj|k_proj|v_proj|gate_proj|up_proj)(\.(?:weight|bias))")
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
SHOWN = 3


@dataclass(frozen=True)
class StockEngine:
    """What decides the checksums of an engine besides its weights: its dtype and where it computes."""

    dtype: Literal["float32", "bfloat16"]
    device: Literal["cuda", "cpu"]


def stock_of(dtype: object, device: object) -> StockEngine | None:
    """Of an engine with this dtype and device; None where checksums can't be told for the dtype."""
    if dtype not in DTYPES:
        return None
    return StockEngine("float32" if dtype == "float32" else "bfloat16", "cpu" if device == "cpu" else "cuda")


@dataclass
class _Parameter:
    """One parameter of the engine: the hash of the parts that came in order, and those that wait."""

    parts: int | None
    hash: TensorHash
    done: int = 0
    waiting: dict[int, bytes] = field(default_factory=dict)


class StockChecksums:
    """Collects one version, tensor by tensor."""

    def __init__(self, engine: StockEngine) -> None:
        self._dtype, self._hash = DTYPES[engine.dtype], HASHES[engine.device]
        self._parameters: dict[str, _Parameter] = {}

    def add(self, tensor: HostTensor) -> None:
        """One tensor of the checkpoint, under its name there. Raises WeightError where it can't be had exactly
        in the engine's dtype, or comes twice."""
        name, position, parts = _place(tensor.name)
        parameter = self._parameters.setdefault(name, _Parameter(parts, self._hash()))
        if position < parameter.done or position in parameter.waiting:
            raise WeightError(f"{tensor.name} comes twice")
        parameter.waiting[position] = self._bytes(tensor)
        while parameter.done in parameter.waiting:
            parameter.hash.update(parameter.waiting.pop(parameter.done))
            parameter.done += 1

    def finish(self) -> dict[str, str]:
        """Checksum by the engine's name of the parameter; raises WeightError where a part didn't come."""
        for name, parameter in self._parameters.items():
            if parameter.waiting or (parameter.parts is not None and parameter.done != parameter.parts):
                raise WeightError(f"{name}: part {parameter.done} of it is not in the version")
        return {name: p.hash.hexdigest() for name, p in self._parameters.items()}

    def _bytes(self, tensor: HostTensor) -> bytes:
        if (tensor.dtype, self._dtype) == ("BF16", "F32"):
            bits = tensor.bits.astype(np.uint32) << np.uint32(16)
        else:
            tensor = narrowed(tensor, self._dtype)
            bits = tensor.bits
            if tensor.dtype != self._dtype:
                raise WeightError(
                    f"{tensor.name} is {tensor.dtype}, the engine has it rounded to {self._dtype}: what it "
                    "holds can't be proved; give --dtype the dtype that the trainer exports"
                )
        rows = tensor.shape[0] if tensor.shape else 1
        padding = -rows % VOCABULARY_ROWS if tensor.name.endswith(_VOCABULARY) else 0
        return bits.tobytes() + bytes(bits.nbytes // rows * padding)


def stock_checksums(tensors: Iterable[HostTensor], engine: StockEngine) -> dict[str, str]:
    """Checksums of a whole version."""
    sums = StockChecksums(engine)
    for tensor in tensors:
        sums.add(tensor)
    return sums.finish()


def disagreement(expected: Mapping[str, str], found: Mapping[str, str]) -> str | None:
    """Why what an engine reports is not the version; None where every parameter of both is the same. A head
    that the engine doesn't list is fine where it equals the embedding: the engine ties them."""
    wrong = sorted(name for name in found if name in expected and found[name] != expected[name])
    unknown = sorted(set(found) - set(expected))
    absent = set(expected) - set(found)
    if expected.get("lm_head.weight") == expected.get("model.embed_tokens.weight"):
        absent.discard("lm_head.weight")
    for names, what in ((wrong, "differ"), (sorted(absent), "are missing"), (unknown, "are unknown")):
        if names:
            shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if names[SHOWN:] else "")
            return f"{len(names)} of its {len(found)} parameters {what}: {shown}"
    return None


def _place(name: str) -> tuple[str, int, int | None]:
    """The engine's parameter that a tensor goes into, its position there, and how many parts that has."""
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        base, at, part = expert.group(1), int(expert.group(2)), expert.group(3)
        if part == "down_proj":
            return f"{base}.w2_weight", at, None
        return f"{base}.w13_weight", 2 * at + (part == "up_proj"), None
    linear = _LINEAR.fullmatch(name)
    if linear is None:
        return name, 0, 1
    stacked, position = _STACKED[linear.group(2)]
    return f"{linear.group(1)}{stacked}{linear.group(3)}", position, _PARTS[stacked]
