"""What a run asks of a Ray cluster, what that has, and which bundle each place gets. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnout.placement.cluster import Place
from turnout.placement.layout import by_number

KINDS = ("CPU", "GPU")


@dataclass(frozen=True)
class Group:
    """A placement group: its places in order, and Ray's word for how they lie to one another."""

    name: str
    places: tuple[Place, ...]
    strategy: str = "PACK"


def resources(place: Place) -> dict[str, float]:
    """A bundle: Ray keeps all of it on one node. Without GPUs a device is a process."""
    return {"CPU": max(1, len(place.shared)), "GPU": place.devices} if place.gpus else {"CPU": place.devices}


def trainer_places(nodes: int, per_node: int, gpus: bool) -> tuple[Place, ...]:
    """A place on each node of the trainer, for its ranks: the first `per_node` on the first one, and so on."""
    return tuple(
        Place(
            f"trainer-{node}",
            per_node,
            gpus,
            tuple(map(rank_name, range(node * per_node, (node + 1) * per_node))),
        )
        for node in range(nodes)
    )


def rank_name(rank: int) -> str:
    return f"trainer-rank-{rank}"


def groups(run: str, trainer: Sequence[Place], engines: Sequence[Place]) -> list[Group]:
    """The placement groups of a run: one, packed. A trainer over several nodes has one of its own, which keeps its
    places apart: Ray knows one way for all bundles of a group."""
    name = f"turnout-{run}"
    if len(trainer) > 1:
        found = [Group(f"{name}-trainer", tuple(trainer), "STRICT_SPREAD"), Group(name, tuple(engines))]
    else:
        found = [Group(name, (*trainer, *engines))]
    return [group for group in found if group.places]


def members(place: Place) -> tuple[Place, ...]:
    """The place of each process that shares it."""
    return tuple(Place(name, 1, place.gpus) for name in place.shared) or (place,)


def in_order(places: Sequence[Place], nodes: Mapping[int, tuple[str, str]]) -> list[int]:
    """The bundle of each place: among those of its size the next one by the number of its node. `nodes`: address
    and id of the node of each bundle, by its number."""

    def rank(bundle: int) -> tuple[object, ...]:
        address, node = nodes[bundle]
        return by_number(address), node, bundle

    sizes = [tuple(resources(place).items()) for place in places]
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
