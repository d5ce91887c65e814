"""The quickstart's data: made by its script, and held-out sums are unknown in training."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest

DATA = Path(__file__).parents[3] / "examples" / "data"


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def unordered(row: dict) -> tuple[int, ...]:
    return tuple(sorted((row["metadata"]["left"], row["metadata"]["right"])))


@pytest.mark.parametrize("name", ["sums_train.jsonl", "sums_heldout.jsonl"])
def test_the_script_makes_the_files_byte_for_byte(name: str, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_sums", DATA / "make_sums.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.make(tmp_path)
    assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


@pytest.mark.parametrize("name", ["sums_train.jsonl", "sums_heldout.jsonl"])
def test_labels_are_the_sums_of_what_the_prompt_shows(name: str) -> None:
    for row in rows(name):
        left, right = row["metadata"]["left"], row["metadata"]["right"]
        assert 10 <= left <= 99 and 10 <= right <= 99
        assert f"{left} + {right}" in row["prompt"][-1]["content"]
        assert row["label"] == str(left + right)


def test_no_heldout_pair_is_in_training_in_either_order() -> None:
    train, heldout = rows("sums_train.jsonl"), rows("sums_heldout.jsonl")
    assert len(heldout) == 256
    assert len({unordered(row) for row in heldout}) == 256
    assert not {unordered(row) for row in heldout} & {unordered(row) for row in train}


def test_training_rows_are_distinct() -> None:
    train = rows("sums_train.jsonl")
    assert len({json.dumps(row) for row in train}) == len(train) == 2000


def test_no_constant_answer_scores_on_the_heldout_sums() -> None:
    heldout = rows("sums_heldout.jsonl")
    [(_, most)] = Counter(row["label"] for row in heldout).most_common(1)
    assert most / len(heldout) < 0.05
