"""What a run asks of a Ray cluster, what that has, and which bundle each place gets. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from turnout.placement.cluster import Place
from turnout.placement.layout import by_number

KINDS = ("CPU", "GPU")


def resources(place: Place) -> dict[str, float]:
    """A bundle: Ray keeps all of it on one node. Without GPUs a device is a process."""
    return {"CPU": 1, "GPU": place.devices} if place.gpus else {"CPU": place.devices}


def in_order(places: Sequence[Place], nodes: Mapping[int, tuple[str, str]]) -> list[int]:
    """The bundle of each place: among those of its size the next one by the number of its node. `nodes`: address
    and id of the node of each bundle, by its number."""

    def rank(bundle: int) -> tuple[object, ...]:
        address, node = nodes[bundle]
        return by_number(address), node, bundle

    sizes = [(place.devices, place.gpus) for place in places]
    found = {
        size: iter(sorted((at for at, s in enumerate(sizes) if s == size), key=rank)) for size in set(sizes)
    }
    return [next(found[size]) for size in sizes]


def asked(bundles: Iterable[Mapping[str, float]]) -> str:
    """In words: "2 x {CPU 1}, 1 x {CPU 1, GPU 4}"."""
    counts = Counter(_sizes(bundle) for bundle in bundles)
    return ", ".join(f"{count} x {{{text}}}" for text, count in counts.items())


def there(nodes: Iterable[Mapping[str, Any]]) -> str:
    """The nodes of a cluster that live, in words, by `ray.nodes()`."""
    living = sorted(
        (node for node in nodes if node["Alive"]), key=lambda node: by_number(node["NodeManagerAddress"])
    )
    return (
        ", ".join(f"{node['NodeManagerAddress']} {{{_sizes(node['Resources'])}}}" for node in living)
        or "no node"
    )


def _sizes(of: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {of[kind]:g}" for kind in KINDS if kind in of) or "none"
