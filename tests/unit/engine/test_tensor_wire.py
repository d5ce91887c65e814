"""Pickles of tensor handles: what torch and SGLang make is read, everything else is refused."""

from __future__ import annotations

import base64
import dataclasses
import io
import os
import pickle
import sys
import types
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.multiprocessing

from turnout.core.errors import WeightError
from turnout.engine import tensor_wire
from turnout.engine.tensor_wire import FLATTENED, read_payload


@pytest.fixture(autouse=True)
def by_name():
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)


def encoded(value) -> str:
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(value)
    return base64.b64encode(buffer.getvalue()).decode()


def torch_segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")}  # noqa: PTH208


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def test_named_tensors_of_torch_are_read_and_their_segments_go():
    before = torch_segments()
    plain, transposed = bf16(3, 5), bf16(4, 6).t()
    parameter = torch.nn.Parameter(torch.randn(7))
    part = torch.arange(20, dtype=torch.int64)[5:9]
    sent = [("a", plain), ("b", transposed), ("c", parameter), ("d", part)]
    found = read_payload([encoded(sent)], None)
    assert [(t.name, t.dtype, t.shape) for t in found] == [
        ("a", "BF16", (3, 5)), ("b", "BF16", (6, 4)), ("c", "F32", (7,)), ("d", "I64", (4,)),
    ]  # fmt: skip
    for tensor, (_, original) in zip(found, sent):
        flat = original.detach().contiguous().view(-1)
        assert tensor.bits.tobytes() == flat.view(torch.uint8).numpy().tobytes()
    del found, tensor, plain, transposed, parameter, part, sent, original, flat
    assert torch_segments() == before


def bucket(element: int = 1):
    """A flattened bucket as SGLang lays it out; `element` 2: by elements of one dtype, as before 0.5.13."""
    one, two = bf16(2, 3), bf16(4)
    flat = torch.cat([one.view(-1), two.view(-1)])
    flat = flat.view(torch.uint8) if element == 1 else flat
    width = 2 // element
    rows = [("one", one, 0, 6), ("two", two, 6, 10)]
    metadata = [
        SimpleNamespace(
            name=name,
            shape=t.shape,
            dtype=t.dtype,
            start_idx=a * width,
            end_idx=b * width,
            numel=(b - a) * width,
        )
        for name, t, a, b in rows
    ]
    return {"flattened_tensor": flat, "metadata": metadata}, (one, two)


@pytest.mark.parametrize("element", [1, 2])
def test_flattened_buckets_of_either_indexing(element):
    sent, originals = bucket(element)
    found = read_payload(["not mine", encoded(sent)], FLATTENED, rank=1)
    assert [(t.name, t.shape) for t in found] == [("one", (2, 3)), ("two", (4,))]
    for tensor, original in zip(found, originals):
        assert tensor.bits.tobytes() == original.view(-1).view(torch.uint8).numpy().tobytes()


def sglang_module(monkeypatch, name: str):
    """An empty module of that name, as a sender with SGLang installed has it."""
    parts = name.split(".")
    for at in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:at]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@dataclasses.dataclass
class FlattenedTensorMetadata:
    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


@dataclasses.dataclass
class LocalSerializedTensor:
    values: list[bytes]


def as_theirs(monkeypatch, kind, module: str):
    monkeypatch.setattr(sglang_module(monkeypatch, module), kind.__name__, kind, raising=False)
    monkeypatch.setattr(kind, "__module__", module)


def test_sglangs_own_classes_resolve_to_ours(monkeypatch):
    as_theirs(monkeypatch, FlattenedTensorMetadata, "sglang.srt.weight_sync.tensor_bucket")
    sent, originals = bucket()
    sent["metadata"] = [FlattenedTensorMetadata(**vars(m)) for m in sent["metadata"]]
    payload = encoded(sent)
    monkeypatch.undo()
    assert b"sglang.srt.weight_sync" in base64.b64decode(payload)
    found = read_payload([payload], FLATTENED)
    assert [t.shape for t in found] == [(2, 3), (4,)]
    assert found[1].bits.tobytes() == originals[1].view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "module",
    [
        "sglang.srt.model_executor.model_runner",
        "sglang.srt.model_executor.model_runner_components.weight_updater",
    ],
)
def test_a_tensor_pickled_per_rank_is_that_of_the_rank(monkeypatch, module):
    as_theirs(monkeypatch, LocalSerializedTensor, module)
    ranks = [torch.tensor([1.0]), torch.tensor([2.0])]
    entries = [base64.b64decode(encoded(tensor)) for tensor in ranks]
    payload = encoded([("w", LocalSerializedTensor(entries))])
    monkeypatch.undo()
    (found,) = read_payload([payload, payload], None, rank=1)
    assert found.bits.view(np.float32).tolist() == [2.0]


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function, *arguments) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


STORAGE = torch.UntypedStorage
SHARED = torch.multiprocessing.reductions.rebuild_storage_filename
TENSOR = torch.multiprocessing.reductions.rebuild_tensor
TYPED = torch.multiprocessing.reductions.rebuild_typed_storage
EMPTY = Calls(TYPED, Calls(torch.multiprocessing.reductions.rebuild_storage_empty, STORAGE), torch.float32)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Calls(os.system, "true"), "posix.system has no place"),
        (Calls(eval, "1"), "builtins.eval has no place"),
        (Calls(torch.load, "x"), "torch.serialization.load has no place"),
        (
            [("a", Calls(SHARED, STORAGE, b"", b"/../etc/passwd", 8))],
            "not the name of a shared-memory segment",
        ),
        ([("a", Calls(SHARED, STORAGE, b"", b"/turnout_none", 8))], "turnout_none cannot be opened"),
        ([("a", Calls(SHARED, STORAGE, b"/none", b"/turnout_none", 8))], "turnout_none cannot be opened"),
        ([("a", Calls(SHARED, STORAGE, b"", b"/turnout_none", -1))], "not the size of a segment"),
        ([("a", Calls(TENSOR, torch.Tensor, EMPTY, (0, (2, 2), (2, 1), False)))], "does not lie within"),
        ([("a", Calls(TENSOR, torch.Tensor, EMPTY, (0, (1 << 40,), (0,), False)))], "does not lie within"),
        ([("a", Calls(TENSOR, torch.Tensor, 3, (0, (), (), False)))], "no typed storage"),
        ([("a", 3)], "a is not a tensor"),
        ([1], "must be a list of"),
        (3, "must be a list of"),
    ],
)
def test_what_is_not_a_list_of_tensors_is_refused(value, message):
    with pytest.raises(WeightError, match=message):
        read_payload([base64.b64encode(pickle.dumps(value)).decode()], None)


@pytest.mark.parametrize("payload", ["%", "", "gASVAg==", base64.b64encode(b"\x80\x04K\x01").decode()])
def test_torn_payloads_are_refused(payload):
    with pytest.raises(WeightError):
        read_payload([payload], None)
    with pytest.raises(WeightError, match="rank 1 has none"):
        read_payload([payload], None, rank=1)


def change_state(target, state) -> str:
    """A pickle that sets attributes on something it found by name."""
    head = b"\x80\x04" + b"c" + target + b"\n"
    content = head + b"N" + pickle.dumps(state, 2)[2:-1] + b"\x86b."
    return base64.b64encode(content).decode()


@pytest.mark.parametrize(
    "target",
    [
        b"torch.multiprocessing.reductions\nrebuild_tensor",
        b"sglang.srt.weight_sync.tensor_bucket\nFlattenedTensorMetadata",
        b"sglang.srt.model_executor.model_runner\nLocalSerializedTensor",
        b"types\nSimpleNamespace",
    ],
)
def test_a_pickle_cannot_change_what_it_finds(target):
    before = {key: getattr(value, "__defaults__", None) for key, value in tensor_wire._KNOWN.items()}
    with pytest.raises(WeightError):
        read_payload([change_state(target, {"__defaults__": (9,), "__init__": 3, "__new__": 3})], None)
    assert {key: getattr(value, "__defaults__", None) for key, value in tensor_wire._KNOWN.items()} == before
    sent, _ = bucket()
    assert len(read_payload([encoded(sent)], FLATTENED)) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start_idx": 2}, "needs 12 bytes, the bucket gives bytes 2 to 12 of 20"),
        ({"end_idx": 400}, "needs 12 bytes"),
        ({"shape": (1 << 40,)}, "needs"),
        ({"dtype": "complex64"}, "dtype complex64 is not known"),
        ({"start_idx": None}, "not described as SGLang does"),
    ],
)
def test_a_bucket_that_contradicts_itself_is_refused(change, message):
    sent, _ = bucket()
    vars(sent["metadata"][0]).update(change)
    with pytest.raises(WeightError, match=message):
        read_payload([encoded(sent)], FLATTENED)
    with pytest.raises(WeightError, match="has flattened_tensor and metadata"):
        read_payload([encoded([("a", sent["flattened_tensor"])])], FLATTENED)


def test_descriptors_cannot_be_sent():
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    value = [("a", Calls(torch.multiprocessing.reductions.rebuild_storage_fd, STORAGE, 3, 8))]
    with pytest.raises(WeightError, match="sharing strategy to file_system"):
        read_payload([base64.b64encode(pickle.dumps(value)).decode()], None)
