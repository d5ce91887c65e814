"""Rollout data on the way to the ranks: the same samples come out, and nothing stays in shared memory."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from turnout.core.errors import TrainError
from turnout.core.types import TrainSample
from turnout.placement import shared_memory
from turnout.train.batch_bytes import bytes_of, samples_of
from turnout.train.data_transport import LocalData, read_data

NUMBERS = some.lists(some.floats(allow_nan=False), max_size=5).map(tuple)
COUNTS = some.lists(some.integers(-(2**63), 2**63 - 1), max_size=5).map(tuple)
SAMPLES = some.builds(
    TrainSample,
    some.text(max_size=4),
    COUNTS,
    COUNTS,
    NUMBERS,
    COUNTS,
    NUMBERS,
    lags=COUNTS,
    reference=NUMBERS,
    routed=some.binary(max_size=5),
)


@given(some.lists(SAMPLES, max_size=4))
def test_the_same_samples_come_out(samples: list[TrainSample]) -> None:
    assert list(samples_of(bytes_of(samples))) == samples


def test_what_a_float_can_be_survives() -> None:
    sample = TrainSample("g", (1,), (2, 3), (-0.0, math.inf), (1, 0), (math.nan, 5e-324))
    (found,) = samples_of(bytes_of([sample]))
    assert math.copysign(1.0, found.logprobs[0]) == -1.0 and found.logprobs[1] == math.inf
    assert math.isnan(found.advantages[0]) and found.advantages[1] == 5e-324


def test_bytes_are_read_by_their_handle_until_they_are_dropped() -> None:
    way = LocalData()
    handle = way.put(b"abc")
    path = Path(handle.removeprefix("file:"))
    assert read_data(handle) == b"abc" and path.stat().st_mode & 0o777 == 0o600
    way.drop(handle)
    way.drop(handle)
    assert not path.exists()


def test_shared_memory_that_takes_nothing_is_a_train_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "FOLDER", Path("/dev/full"))  # no folder at all
    with pytest.raises(TrainError, match="3 bytes of rollout data"):
        LocalData().put(b"abc")
