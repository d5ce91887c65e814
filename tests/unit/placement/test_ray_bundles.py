"""What is asked of a Ray cluster, and which bundle each engine gets."""

from __future__ import annotations

import pytest

from turnout.placement.cluster import Place
from turnout.placement.ray_bundles import (
    asked,
    groups,
    in_order,
    members,
    resources,
    there,
    trainer_places,
)


def test_a_bundle_holds_all_devices_of_an_engine() -> None:
    bundles = [resources(place) for place in (Place("a"), Place("b"), Place("c", 4, gpus=True))]
    assert bundles == [{"CPU": 1}, {"CPU": 1}, {"CPU": 1, "GPU": 4}]
    assert asked(bundles) == "2 x {CPU 1}, 1 x {CPU 1, GPU 4}"


def test_bundles_of_one_size_go_to_the_engines_by_the_number_of_their_node() -> None:
    places = [Place("a"), Place("wide", 2), Place("b"), Place("c"), Place("wider", 2)]
    nodes = {
        0: ("10.0.0.10", "x"),
        1: ("10.0.0.10", "x"),
        2: ("10.0.0.9", "y"),
        3: ("10.0.0.9", "y"),
        4: ("9::1", "z"),
    }
    assert in_order(places, nodes) == [2, 1, 3, 0, 4]


def test_only_nodes_that_live_are_told() -> None:
    rows = [
        ("10.0.0.10", True, {"CPU": 2.0, "memory": 1e9}),
        ("10.0.0.2", True, {"CPU": 8.0, "GPU": 1.0}),
        ("x", False, {}),
    ]
    nodes = [{"NodeManagerAddress": name, "Alive": alive, "Resources": has} for name, alive, has in rows]
    assert there(nodes) == "10.0.0.2 {CPU 8, GPU 1}, 10.0.0.10 {CPU 2}"
    assert there(nodes[2:]) == "no node"


def test_the_ranks_of_one_node_share_a_bundle_and_lie_in_order() -> None:
    places = trainer_places(2, 3, gpus=False)
    assert [resources(place) for place in places] == [{"CPU": 3}] * 2
    ranks = [[one.name for one in members(place)] for place in places]
    assert ranks == [[f"trainer-rank-{rank}" for rank in node] for node in ((0, 1, 2), (3, 4, 5))]
    assert {resources(one)["CPU"] for place in places for one in members(place)} == {1}
    assert members(Place("engine-0", 4)) == (Place("engine-0", 4),)


def test_a_rank_with_a_gpu_has_a_cpu_as_well() -> None:
    (place,) = trainer_places(1, 4, gpus=True)
    assert resources(place) == {"CPU": 4, "GPU": 4}
    assert [resources(one) for one in members(place)] == [{"CPU": 1, "GPU": 1}] * 4
    # an engine of as many GPUs needs another bundle
    assert in_order([Place("engine-0", 4, gpus=True), place], {0: ("b", "b"), 1: ("a", "a")}) == [0, 1]


# nodes of the trainer, its ranks on each, engines -> the groups: places, and how they lie to one another
GROUPS = [
    ((0, 0), 2, [("turnout-x", ["engine-0", "engine-1"], "PACK")]),
    ((1, 2), 1, [("turnout-x", ["trainer-0", "engine-0"], "PACK")]),
    (
        (2, 1),
        1,
        [
            ("turnout-x-trainer", ["trainer-0", "trainer-1"], "STRICT_SPREAD"),
            ("turnout-x", ["engine-0"], "PACK"),
        ],
    ),
    ((3, 2), 0, [("turnout-x-trainer", ["trainer-0", "trainer-1", "trainer-2"], "STRICT_SPREAD")]),
    ((0, 0), 0, []),
]


@pytest.mark.parametrize(("trainer", "engines", "expected"), GROUPS)
def test_a_trainer_over_several_nodes_has_a_group_that_keeps_them_apart(
    trainer: tuple[int, int], engines: int, expected: list[tuple[str, list[str], str]]
) -> None:
    places = [Place(f"engine-{number}") for number in range(engines)]
    found = groups("x", trainer_places(*trainer, gpus=False), places)
    assert [(one.name, [place.name for place in one.places], one.strategy) for one in found] == expected
