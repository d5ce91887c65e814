"""What is asked of a Ray cluster, and which bundle each engine gets."""

from __future__ import annotations

from turnout.placement.cluster import Place
from turnout.placement.ray_bundles import asked, in_order, resources, there


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
