"""Folders that an engine which believes everything may be given, and those that it may not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.weight_files import assets, model
from turnout.core.errors import WeightError
from turnout.placement.real import DiskStore
from turnout.weights.loadable import check_loadable
from turnout.weights.store import WeightStore
from turnout.weights.tensors import HostTensor, nonfinite_count


def finite() -> list[HostTensor]:
    return [tensor for tensor in model(1) if not nonfinite_count(tensor)]


def published(folder: Path, tensors: list[HostTensor]) -> Path:
    store = WeightStore(folder / "w", DiskStore(), assets(folder / "assets"), 200)
    store.open("run", 0, "0" * 32)
    return store.publish(tensors, 1).folder


def test_a_good_version_passes(tmp_path: Path) -> None:
    assert check_loadable(published(tmp_path, finite())).version.counter == 1


def test_nan_and_infinity_are_named(tmp_path: Path) -> None:
    tensors = finite()
    bits = np.array([0, 0x7FC0, 0xFF80], np.uint16)
    folder = published(tmp_path, [*tensors, HostTensor("bad.weight", "BF16", (3,), bits)])
    with pytest.raises(WeightError, match=r"bad\.weight has 2 values that are NaN or infinite"):
        check_loadable(folder)


@pytest.mark.parametrize("hurt", ["flip", "rename"])
def test_bytes_that_are_not_those_written_are_refused(hurt: str, tmp_path: Path) -> None:
    folder = published(tmp_path, finite())
    victim = min(folder.glob("model*.safetensors"))
    if hurt == "flip":
        data = bytearray(victim.read_bytes())
        data[-1] ^= 1
        victim.write_bytes(bytes(data))
    else:
        victim.rename(folder / "elsewhere.safetensors")
    with pytest.raises(WeightError, match=victim.name):
        check_loadable(folder)
