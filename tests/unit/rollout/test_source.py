"""Position arithmetic of the prompt source (CKP-04)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnout.core.errors import InvariantBroken
from turnout.core.rng import SeedTree
from turnout.core.types import Prompt
from turnout.rollout.source import PromptSource, epoch_order


def prompts(count: int) -> list[Prompt]:
    return [Prompt(str(i), (i,), str(i)) for i in range(count)]


def source(rows: int = 8, shuffle: bool = True, num_epochs: int | None = 3, seed: int = 1) -> PromptSource:
    return PromptSource(prompts(rows), SeedTree(seed), shuffle, num_epochs)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("rounds", range(1, 7))
def test_ckp_04_stopping_after_any_round_and_resuming_changes_nothing(shuffle: bool, rounds: int) -> None:
    whole = source(shuffle=shuffle)
    expected = [whole.take(4) for _ in range(6)]
    first = source(shuffle=shuffle)
    before = [first.take(4) for _ in range(rounds)]
    resumed = source(shuffle=shuffle)
    resumed.seek(first.position)
    assert before + [resumed.take(4) for _ in range(6 - rounds)] == expected
    assert resumed.exhausted
    assert resumed.take(4) == []


def test_an_epoch_boundary_is_the_start_of_the_next_epoch() -> None:
    one = source(shuffle=False)
    assert [one.prompt_at(n) for n in (0, 7, 8, 23)] == [(0, 0), (0, 7), (1, 0), (2, 7)]
    with pytest.raises(InvariantBroken):
        one.prompt_at(24)


def test_every_epoch_takes_every_row_once_in_an_order_of_its_own() -> None:
    one = source(rows=50, num_epochs=None)
    epochs = [[p.prompt_id for _, p in one.take(50)] for _ in range(3)]
    assert all(sorted(e, key=int) == [str(i) for i in range(50)] for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3


def test_the_order_depends_on_the_seed_only() -> None:
    assert source(seed=1).take(24) == source(seed=1).take(24)
    assert source(rows=50, seed=1).take(50) != source(rows=50, seed=2).take(50)


def test_the_order_of_a_seed_is_pinned() -> None:
    """A resume with a later release has to find the same order."""
    assert epoch_order(8, 0, SeedTree(0)) == [7, 3, 2, 0, 5, 6, 4, 1]


def test_the_end_of_the_data_is_said_and_the_last_batch_is_short() -> None:
    one = source(rows=3, num_epochs=1)
    assert not one.exhausted
    assert [n for n, _ in one.take(2)] == [0, 1]
    assert [n for n, _ in one.take(2)] == [2]
    assert one.exhausted
    assert one.total == 3
    assert source(num_epochs=None).total is None


@pytest.mark.parametrize("position", [-1, 25])
def test_seek_refuses_a_position_outside_the_data(position: int) -> None:
    with pytest.raises(InvariantBroken):
        source().seek(position)


def test_a_source_needs_prompts_and_epochs() -> None:
    for rows, epochs in ((0, 1), (1, 0)):
        with pytest.raises(InvariantBroken):
            source(rows=rows, num_epochs=epochs)


@given(st.integers(1, 9), st.lists(st.integers(0, 7), max_size=8), st.booleans())
def test_ordinals_follow_one_another_whatever_is_taken_at_once(
    rows: int, counts: list[int], shuffle: bool
) -> None:
    one = source(rows=rows, shuffle=shuffle, num_epochs=None)
    taken = [item for count in counts for item in one.take(count)]
    assert [n for n, _ in taken] == list(range(sum(counts)))
    assert taken == source(rows=rows, shuffle=shuffle, num_epochs=None).take(sum(counts))


def test_an_older_epoch_can_be_asked_for_again() -> None:
    one = source(rows=5, num_epochs=None)
    expected = dict(one.take(25))
    assert all(one.prompt(n) == expected[n] for n in (24, 0, 13, 7, 20, 2))
