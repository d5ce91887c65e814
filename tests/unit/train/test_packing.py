from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnout.core.errors import ConfigError, TrainError
from turnout.train import packing
from turnout.train.packing import SampleShape, attention_blocks, plan_micro_batches

lengths = st.integers(1, 40)
prompts = st.lists(st.tuples(lengths, st.lists(lengths, min_size=1, max_size=6)), max_size=5)


def shapes_from(rows) -> list[SampleShape]:
    return [SampleShape(prompt, r, number) for number, (prompt, tails) in enumerate(rows) for r in tails]


@settings(deadline=None)
@given(prompts, st.integers(80, 250))
def test_every_sample_is_planned_once_within_the_budget(rows, budget):
    shapes = shapes_from(rows)
    plan = plan_micro_batches(shapes, budget)
    members = [(m.sample, m.response, u.prompt) for micro in plan for u in micro.units for m in u.members]
    assert sorted(members) == [(i, s.response, s.prompt) for i, s in enumerate(shapes)]
    assert all(micro.rows <= budget for micro in plan)
    assert plan == plan_micro_batches(shapes, budget)


@settings(deadline=None)
@given(prompts)
def test_blocks_let_each_row_see_exactly_its_prompt_and_its_own_past(rows):
    with mock.patch.multiple(packing, QUERY_BLOCK=16, TAIL_BLOCK=9):
        check_blocks(rows)


def check_blocks(rows):
    """Against the definition: a prompt row sees the prompt up to itself; a tail row the prompt and its own tail."""
    for micro in plan_micro_batches(shapes_from(rows), 120):
        expected: list[set[int]] = []
        for unit in micro.units:
            first = len(expected)
            expected += [set(range(first, first + i + 1)) for i in range(unit.prompt)]
            prompt = set(range(first, first + unit.prompt))
            for member in unit.members:
                tail = len(expected)
                expected += [prompt | set(range(tail, tail + i + 1)) for i in range(member.tail)]
        seen: list[set[int] | None] = [None] * micro.rows
        for block in attention_blocks(micro):
            prefix = {r for span in block.prefix for r in range(span.first, span.first + span.length)}
            row = block.own.first
            assert sum(block.segments) == block.own.length <= 16
            for segment in block.segments:
                for i in range(segment):
                    assert seen[row + i] is None
                    seen[row + i] = prefix | set(range(row, row + i + 1))
                row += segment
        assert seen == expected


def test_a_sample_longer_than_the_budget_names_the_flag_and_every_such_sample():
    shapes = [SampleShape(5, 3, 0), SampleShape(60, 5, 1), SampleShape(5, 70, 2)]
    with pytest.raises(ConfigError, match="--max-tokens-per-gpu") as caught:
        plan_micro_batches(shapes, 63)
    assert len(caught.value.faults) == 2
    assert "at least 64" in str(caught.value) and "at least 74" in str(caught.value)
    assert len(plan_micro_batches(shapes, 74)) >= 2


@pytest.mark.parametrize("shape", [SampleShape(0, 3, 0), SampleShape(3, 0, 0)])
def test_a_sample_without_prompt_or_response_is_an_error(shape):
    with pytest.raises(TrainError, match="sample 0"):
        plan_micro_batches([shape], 100)


def test_a_shared_prompt_is_counted_once_and_costs_are_balanced():
    shapes = [SampleShape(45, 20, n // 8) for n in range(64)]
    (micro,) = plan_micro_batches(shapes, 4096)
    assert micro.rows == 8 * (45 + 8 * 19)
    halves = plan_micro_batches(shapes, 800)
    assert [m.rows for m in halves] == [788, 788]
