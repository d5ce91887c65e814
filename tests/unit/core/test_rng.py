"""Seeds depend on the path and on nothing else."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from turnout.core.rng import SeedTree

PATHS = st.lists(st.one_of(st.integers(-5, 50), st.text("ab/:int str0", max_size=8)), max_size=4).map(tuple)


def test_a_seed_is_the_same_whatever_was_asked_before() -> None:
    tree = SeedTree(7)
    expected = SeedTree(7).child("sample", 3, 0).child(1).seed
    for ordinal in range(20):
        _ = tree.child("sample", ordinal, 0).seed
        tree.random().random()
    assert tree.child("sample", 3, 0, 1).seed == expected
    assert tree.child("sample").child(3).child(0).child(1).seed == expected


def test_seeds_of_a_release_are_pinned() -> None:
    """A resume with a later release has to sample the same."""
    assert SeedTree(1234).child("sample", 0, 0).child(0).seed == 3363272760109474666


def test_no_collisions_on_a_sample() -> None:
    seeds = {
        SeedTree(root).child("sample", ordinal, attempt, member).seed
        for root in range(3)
        for ordinal in range(200)
        for attempt in range(2)
        for member in range(16)
    }
    assert len(seeds) == 3 * 200 * 2 * 16
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_the_type_of_a_name_matters() -> None:
    tree = SeedTree(0)
    assert tree.child(1).seed != tree.child("1").seed
    assert tree.child("int:1").seed != tree.child(1).seed
    assert tree.child().seed == tree.seed


@given(PATHS, PATHS)
def test_different_paths_have_different_seeds(
    left: tuple[str | int, ...], right: tuple[str | int, ...]
) -> None:
    same = [*map(type, left)] == [*map(type, right)] and left == right
    assert (SeedTree(0).child(*left).seed == SeedTree(0).child(*right).seed) == same


def test_a_name_that_spells_a_path_is_not_that_path() -> None:
    assert SeedTree(0).child("a/str:b").seed != SeedTree(0).child("a", "b").seed


def test_generators_of_a_node_are_fresh_and_leave_the_global_one_alone() -> None:
    state = random.getstate()
    node = SeedTree(5).child("prompts")
    assert [node.random().random() for _ in range(3)] == [node.random().random()] * 3
    assert random.getstate() == state


def test_seeds_of_many_children_are_those_of_each():
    node = SeedTree(7).child("sample/1", 3)
    assert node.seeds(12) == [node.child(at).seed for at in range(12)]
