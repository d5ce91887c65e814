"""metrics.jsonl and TensorBoard."""

from __future__ import annotations

import math

import numpy as np
import pytest

from turnout.core.errors import DataError
from turnout.observe.boards import TensorBoard
from turnout.observe.metrics import REWARD, MetricsLog, read_metrics, repeatable


def test_rows_are_read_back_and_numbers_that_are_not_finite_are_null_and_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(1, {REWARD: 0.5, "seconds/train": 1.25, "b": math.nan, "a": math.inf, "n": 3})
        log.write(2, {"b": math.nan})
        assert log.nonfinite == {"a": 1, "b": 2}
    assert read_metrics(path) == [
        (1, {"a": None, "b": None, "n": 3.0, REWARD: 0.5, "seconds/train": 1.25}),
        (2, {"b": None}),
    ]
    assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()


def test_the_order_in_which_values_are_given_does_not_show(tmp_path):
    texts = []
    for name, values in (("a", {"x": 1, "y": 2}), ("b", {"y": 2, "x": 1})):
        with MetricsLog(tmp_path / name) as log:
            log.write(1, values)
        texts.append((tmp_path / name).read_bytes())
    assert texts[0] == texts[1]


def test_timings_are_apart_from_what_repeats():
    assert repeatable({"seconds/train": 1.0, "rollout/seconds": 2.0, "x": None}) == {
        "rollout/seconds": 2.0,
        "x": None,
    }


def test_a_torn_last_row_is_left_out_and_a_bad_one_is_told(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "a": 2}\n{"step": 2, "a"')
    assert read_metrics(path) == [(1, {"a": 2})]
    for bad in ("[]", "{}", "x", "3"):
        path.write_text(f'{{"step": 1}}\n{bad}\n')
        with pytest.raises(DataError, match=r"m\.jsonl:2"):
            read_metrics(path)


def test_tensorboard_gets_the_finite_numbers(tmp_path):
    from tensorboardX.crc32c import crc32c
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    def masked(part: bytes) -> bytes:
        crc = crc32c(part)
        return ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8 & 0xFFFFFFFF).to_bytes(4, "little")

    with MetricsLog(tmp_path / "m.jsonl", [TensorBoard(tmp_path / "board", 2)]) as log:
        log.write(3, {"a": 0.25, "b": math.nan, "of/x y": 1e300})
        log.write(300, {"a": -2})
    (file,) = (tmp_path / "board").iterdir()
    assert file.name.startswith("events.out.tfevents.")
    data, found, at, events = file.read_bytes(), [], 0, []
    while at < len(data):  # TFRecord: length (8 bytes), its checksum (4), payload, its checksum (4)
        end = at + 12 + int.from_bytes(data[at : at + 8], "little")
        assert data[at + 8 : at + 12] == masked(data[at : at + 8])
        assert data[end : end + 4] == masked(data[at + 12 : end])
        event = Event.FromString(data[at + 12 : end])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        events.append(event)
        at = end + 4
    largest = float(np.finfo(np.float32).max)
    assert found == [(3, "a", 0.25), (3, "of/x_y", largest), (300, "a", -2)]
    begins = [event.step for event in events if event.session_log.status == SessionLog.START]
    assert begins == [3], "what it holds of steps from 3 on is purged"
    assert events[0].file_version == "brain.Event:2" and all(event.wall_time > 1e9 for event in events)


def test_a_run_that_goes_on_takes_out_the_rows_of_steps_that_were_undone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step in range(1, 6):
            log.write(step, {"a": step})
        log.write(4, {"eval/score": 0.5})
    with path.open("a") as file:
        file.write('{"step": 6, "a"')  # torn by the kill
    with MetricsLog(path, behind=3) as log:
        log.write(4, {"a": 40})
        log.sync()
    assert [(step, row["a"]) for step, row in read_metrics(path)] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    with MetricsLog(path, behind=0) as log:
        log.write(1, {"a": 10})
    assert [(step, row["a"]) for step, row in read_metrics(path)] == [(1, 10)]
    assert [name.name for name in tmp_path.iterdir()] == ["metrics.jsonl"]
