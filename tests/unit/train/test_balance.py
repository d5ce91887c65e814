from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnout.core.errors import ConfigError
from turnout.train.balance import OneProcess, balance, plan_ranks
from turnout.train.packing import SampleShape, plan_micro_batches

SHAPES = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=40
).map(lambda rows: [SampleShape(7 * (number + 1), response, number) for number, response in rows])  # fmt: skip


def members(plan):
    return [m.sample for micro in plan for unit in micro.units for m in unit.members]


@settings(max_examples=150, deadline=None)
@given(SHAPES, st.integers(1, 8), st.integers(90, 300))
def test_every_sample_is_on_one_rank_and_all_make_as_many_micro_batches(shapes, ranks, budget):
    plans = plan_ranks(shapes, budget, ranks)
    assert len(plans) == ranks and len({len(plan) for plan in plans}) == 1
    assert sorted(index for plan in plans for index in members(plan)) == list(range(len(shapes)))
    assert plans == plan_ranks(list(shapes), budget, ranks)
    for plan in plans:
        for micro in plan:
            assert micro.rows <= budget
            for unit in micro.units:  # members have their own prompt and length
                for member in unit.members:
                    shape = shapes[member.sample]
                    assert (unit.prompt, member.response) == (shape.prompt, shape.response)
    full = [[bool(micro.units) for micro in plan] for plan in plans]
    assert all(row == sorted(row, reverse=True) for row in full)
    assert not shapes or any(row[-1] for row in full)  # one rank needs as many as all make


@given(SHAPES, st.integers(90, 300))
def test_one_rank_plans_as_one_process(shapes, budget):
    assert plan_ranks(shapes, budget, 1) == (OneProcess().plan(shapes, budget),)
    assert OneProcess().plan(shapes, budget) == plan_micro_batches(shapes, budget)


def test_groups_stay_whole_where_the_load_is_even():
    shapes = [SampleShape(50, 10, number) for number in range(8) for _ in range(4)]
    parts = balance(shapes, 4)
    assert [len(part) for part in parts] == [8] * 4
    for part in parts:
        assert all(len({shapes[i].prompt_number for i in part[k : k + 4]}) == 1 for k in (0, 4))


def test_a_group_is_halved_where_a_rank_would_stand_idle():
    shapes = [SampleShape(10, 30, 0) for _ in range(8)]
    assert [len(part) for part in balance(shapes, 2)] == [4, 4]
    assert sorted(map(len, balance(shapes, 3))) in ([2, 2, 4], [2, 3, 3])
    long = [SampleShape(10, 300, 0), *(SampleShape(10, 20, 1) for _ in range(9))]
    assert sorted(balance(long, 2)) == [[0], list(range(1, 10))]  # a sample is never cut


def test_no_rank_has_much_more_than_its_share_of_ragged_groups():
    shapes = [SampleShape(60, 5 + (37 * i) % 90, i // 8) for i in range(128)]
    loads = [sum(shapes[i].response for i in part) for part in balance(shapes, 4)]
    assert max(loads) < 1.1 * sum(loads) / 4


def test_a_sample_above_the_budget_is_named_by_its_number_in_the_batch():
    shapes = [SampleShape(10, 5, i) for i in range(6)] + [SampleShape(10, 50, 6)]
    with pytest.raises(ConfigError, match="sample 6 needs 59 tokens"):
        plan_ranks(shapes, 40, 4)
