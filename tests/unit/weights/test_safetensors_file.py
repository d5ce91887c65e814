"""safetensors files: bit for bit with the safetensors library, and every broken file refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.weight_files import ODD_SHAPES, as_rows, host, model, raw_file
from turnout.core.errors import WeightError
from turnout.weights.digest import tensor_digest
from turnout.weights.safetensors_file import read_file, write_file
from turnout.weights.tensors import ITEM_BYTES


def row(begin: int, end: int, shape: list[Any] | None = None, dtype: Any = "F32") -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [(end - begin) // 4] if shape is None else shape,
        "data_offsets": [begin, end],
    }


def read(path: Path) -> list[Any]:
    return list(read_file(path))


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_dtype_and_shape_comes_back_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    tensors = [host(name, dtype, shape) for name, shape in ODD_SHAPES.items()]
    size = write_file(tmp_path / "f", tensors)
    assert size == (tmp_path / "f").stat().st_size
    assert as_rows(read(tmp_path / "f")) == as_rows(tensors)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_the_safetensors_library_reads_our_files(dtype: str, tmp_path: Path) -> None:
    tensors = [host(name, dtype, shape) for name, shape in ODD_SHAPES.items()]
    write_file(tmp_path / "f", tensors)
    found = safetensors.deserialize((tmp_path / "f").read_bytes())
    got = {name: (row["dtype"], tuple(row["shape"]), bytes(row["data"])) for name, row in found}
    assert got == as_rows(tensors)


def test_files_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "scalar": np.array(-0.0, np.float32),
        "empty": np.zeros((0, 4), np.float16),
        "odd": rng.integers(0, 255, 3).astype(np.uint8),
        "é/w": rng.normal(size=(4, 5)).astype(np.float64),
        "flags": np.array([True, False]),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "f", metadata={"who": "else"})
    found = {t.name: t for t in read(tmp_path / "f")}
    assert {n: (t.shape, t.bits.tobytes()) for n, t in found.items()} == {
        n: (a.shape, a.tobytes()) for n, a in arrays.items()
    }
    assert {n: t.dtype for n, t in found.items()} == {
        "scalar": "F32", "empty": "F16", "odd": "U8", "é/w": "F64", "flags": "BOOL",
    }  # fmt: skip


def test_tensors_are_views_of_the_file_and_aligned(tmp_path: Path) -> None:
    write_file(tmp_path / "f", [host("w", "F32", (64,))])
    (tensor,) = read(tmp_path / "f")
    assert not tensor.bits.flags.writeable
    assert tensor.bits.flags.aligned
    assert not tensor.bits.flags.owndata


@pytest.mark.parametrize("pad", range(4))
def test_data_of_a_foreign_writer_may_be_misaligned(pad: int, tmp_path: Path) -> None:
    values = np.arange(5, dtype=np.uint32) << 20
    header = {"a": row(0, 1, [1], "U8"), "b": row(1, 21, [5])}
    text = json.dumps(header).encode()
    raw_file(tmp_path / "f", text + b" " * pad, b"\x07" + values.tobytes())
    found = {t.name: t.bits for t in read(tmp_path / "f")}
    assert found["a"].tolist() == [7]
    assert found["b"].tolist() == values.tolist()
    assert found["b"].flags.aligned


def test_wgt_17_a_non_contiguous_array_is_written_by_its_elements(tmp_path: Path) -> None:
    strided = host("w", "U16", (12,)).bits[::2]
    write_file(tmp_path / "f", [type(host("w"))("w", "U16", (6,), strided)])
    (tensor,) = read(tmp_path / "f")
    assert tensor.bits.tolist() == strided.tolist()


def test_wgt_17_two_names_of_one_storage_are_both_written(tmp_path: Path) -> None:
    one = host("a")
    two = type(one)("b", one.dtype, one.shape, one.bits)
    write_file(tmp_path / "f", [one, two])
    assert {t.name: t.bits.tolist() for t in read(tmp_path / "f")} == {
        "a": one.bits.tolist(),
        "b": one.bits.tolist(),
    }


def test_a_file_without_tensors(tmp_path: Path) -> None:
    write_file(tmp_path / "f", [])
    assert read(tmp_path / "f") == []
    assert safetensors.numpy.load_file(tmp_path / "f") == {}


def test_any_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "f", model())
    whole = (tmp_path / "f").read_bytes()
    for size in [0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1]:
        (tmp_path / "cut").write_bytes(whole[:size])
        with pytest.raises(WeightError, match="cut"):
            read(tmp_path / "cut")
    (tmp_path / "cut").write_bytes(whole + b"\0")
    with pytest.raises(WeightError, match="cut"):
        read(tmp_path / "cut")


def test_a_missing_file_is_a_weight_error(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="cannot be read"):
        read(tmp_path / "absent")


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        (b"{}", b"1234", "header tells of 0"),
        (b"{", b"", "truncated|not JSON"),
        (b"{,", b"", "not JSON"),
        (b"[]", b"", "not an object"),
        (b"\xff\xfe\xfa\xfb", b"", "not JSON"),
        (b"[" * 100_000, b"", "not JSON"),
        ({"w": row(4, 8)}, b"12345678", "w: bytes 4 to 8"),
        ({"v": row(0, 4), "w": row(8, 12)}, b"1" * 12, "w: bytes 8 to 12"),
        ({"v": row(0, 8), "w": row(4, 8)}, b"1" * 8, "w: bytes 4 to 8"),
        ({"v": row(0, 4), "w": row(0, 4)}, b"1234", "bytes 0 to 4"),
        ({"w": row(0, 8)}, b"1234", "4 bytes of data"),
        ({"w": row(0, 8, [1])}, b"12345678", "needs 4"),
        ({"w": row(0, 4, [1], "F31")}, b"1234", "w: unknown dtype 'F31'"),
        ({"w": row(0, 4, [1], None)}, b"1234", "w: unknown dtype"),
        ({"w": row(0, 4, [1], ["F32"])}, b"1234", "w: unknown dtype"),
        ({"w": row(0, 4, [-1, -1])}, b"1234", "w: broken shape"),
        ({"w": row(0, 4, [1.0])}, b"1234", "w: broken shape"),
        ({"w": row(0, 0, [2**32, 2**32])}, b"", "w: bytes 0 to 0"),
        ({"w": {"dtype": "F32", "data_offsets": [0, 4]}}, b"1234", "w: broken shape"),
        ({"w": {"dtype": "F32", "shape": [1]}}, b"1234", "w: broken entry"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, b"1234", "w: broken entry"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}}, b"1234", "w: broken entry"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}, b"1234", "w: broken entry"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, float("inf")]}}, b"1234", "w: broken entry"),
        ({"w": 3}, b"1234", "w: broken entry"),
        ({"w": [0, 4]}, b"1234", "w: broken entry"),
    ],
)  # fmt: skip
def test_a_broken_header_is_refused_by_name(header: Any, data: bytes, says: str, tmp_path: Path) -> None:
    path = raw_file(tmp_path / "shard", header, data)
    with pytest.raises(WeightError, match=says) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_an_empty_tensor_may_have_any_other_size(tmp_path: Path) -> None:
    (tensor,) = read(raw_file(tmp_path / "f", {"w": row(0, 0, [2**70, 0])}))
    assert (tensor.shape, tensor.nbytes) == ((2**70, 0), 0)
    assert len(tensor_digest(tensor)) == 32


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 200 << 20, 3])
def test_a_header_beyond_the_file_is_refused(length: int, tmp_path: Path) -> None:
    path = raw_file(tmp_path / "f", b"{}", length=length)
    with pytest.raises(WeightError, match=f"header of {length}"):
        read(path)


def test_nothing_is_handed_out_before_the_whole_header_is_checked(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "f", {"a": row(0, 4), "b": row(4, 8, [3])}, b"12345678")
    with pytest.raises(WeightError):
        next(read_file(path))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2**70) | st.floats() | st.sampled_from(["F32", "x", "0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*ITEM_BYTES]) | JSON,
        "shape": st.lists(st.integers(0, 3), max_size=2) | JSON,
        "data_offsets": st.lists(st.integers(0, 24), min_size=2, max_size=2) | JSON,
    },
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.dictionaries(st.sampled_from("abc"), ENTRY | JSON, max_size=3), size=st.integers(0, 24))
def test_any_header_gives_tensors_or_a_weight_error(
    header: dict[str, Any], size: int, tmp_path: Path
) -> None:
    path = raw_file(tmp_path / "f", header, b"\1" * size)
    try:
        tensors = read(path)
    except WeightError as fault:
        assert str(path) in str(fault)
    else:
        assert sum(t.nbytes for t in tensors) == size
