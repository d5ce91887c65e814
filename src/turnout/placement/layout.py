"""Which devices the trainer and each engine have. Pure: tables of numbers, nothing is asked of a machine.

Promises: devices are ordered by machine and number as numbers, whatever order they came in; no device has two
engines; an engine lies on one machine, or on several whole ones; what does not fit is told before anything is
started, with the group and all its values. The sizes are slime's (its placement group: the greater of both where
they share devices, else the sum, with the engines after the trainer).
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from turnout.config.server_groups import Group, divisors, too_many
from turnout.core.errors import ConfigError, Fault


@dataclass(frozen=True)
class Device:
    """One device: the address or name of its machine, and its number there."""

    node: str
    index: int


@dataclass(frozen=True)
class Wanted:
    """What is to be placed: `actor` devices of the trainer and the groups of engines, in their order. `colocate`:
    both begin at the same device; `external`: engines have devices of somebody else's; `only`: one half runs."""

    actor: int
    groups: tuple[Group, ...]
    colocate: bool = False
    external: bool = False
    only: Literal["", "rollout", "train"] = ""


@dataclass(frozen=True)
class Sizes:
    """Devices in all, those of the trainer (the first ones), and where those of engines begin."""

    total: int
    actor: int
    offset: int


@dataclass(frozen=True)
class Seat:
    """The devices of one engine: the `number`-th of its group."""

    group: Group
    number: int
    devices: tuple[Device, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Its machines; the first has the rank that is asked."""
        return tuple(dict.fromkeys(device.node for device in self.devices))


@dataclass(frozen=True)
class Layout:
    actor: tuple[Device, ...]
    seats: tuple[Seat, ...]


def sizes(wanted: Wanted) -> Sizes:
    """The table; see the module."""
    actor, rollout = wanted.actor, sum(group.num_gpus for group in wanted.groups)
    if wanted.only == "train":
        return Sizes(actor, actor, actor)
    if wanted.only == "rollout":
        return Sizes(0 if wanted.external else rollout, 0, 0)
    if wanted.external:
        return Sizes(actor, actor, actor)
    if wanted.colocate:
        return Sizes(max(actor, rollout), actor, 0)
    return Sizes(actor + rollout, actor, actor)


def ordered(found: Iterable[tuple[str, int | str]]) -> tuple[Device, ...]:
    """Devices in order. Raises ConfigError for a number that is none, and for a device that is there twice."""
    devices: list[Device] = []
    for node, index in found:
        if not str(index).isdecimal():
            raise ConfigError(Fault(f"device of {node}", str(index), "is no number of a device"))
        devices.append(Device(node, int(index)))
    for device, count in Counter(devices).items():
        if count > 1:
            raise ConfigError(Fault(f"device of {device.node}", str(device.index), f"is there {count} times"))
    return tuple(sorted(devices, key=lambda device: (by_number(device.node), device.index)))


def place(wanted: Wanted, devices: Iterable[Device]) -> Layout:
    """Seats of all engines; raises ConfigError with every group that does not fit."""
    there = ordered((device.node, device.index) for device in devices)
    size = sizes(wanted)
    groups = () if wanted.external or wanted.only == "train" else wanted.groups
    faults = [*_actor_fits(size, len(there)), *too_many(groups, len(there), size.offset)]
    if not faults:
        faults = list(_divided(groups))
    if faults:
        raise ConfigError(faults)
    seats: list[Seat] = []
    widths, at = Counter(device.node for device in there), size.offset
    for group in groups:
        for number in range(group.engines):
            begin = at + number * group.ranks
            seats.append(Seat(group, number, there[begin : begin + group.ranks]))
            faults.extend(_whole(seats[-1], begin, widths))
        at += group.num_gpus
    if faults:
        raise ConfigError(faults)
    return Layout(there[: size.actor], tuple(seats))


def _actor_fits(size: Sizes, available: int) -> Iterator[Fault]:
    if size.actor > available:
        reason = f"the trainer needs {size.actor} devices, {available} are available"
        yield Fault("--actor-num-gpus-per-node", str(size.actor), reason, "give fewer, or more devices")


def _divided(groups: tuple[Group, ...]) -> Iterator[Fault]:
    for group in groups:
        if group.num_gpus != group.engines * group.ranks and group.worker_type != "placeholder":
            reason = f"engines of {group.ranks} do not divide it"
            remedy = f"per engine fit: {divisors(group.num_gpus)}"
            yield Fault(group.place, f"num_gpus {group.num_gpus}", reason, remedy)


def _whole(seat: Seat, begin: int, widths: Counter[str]) -> Iterator[Fault]:
    """An engine over several machines has all devices of each of them."""
    held = Counter(device.node for device in seat.devices)
    parts = [f"{count} of {widths[node]} of {node}" for node, count in held.items()]
    if len(held) > 1 and held != {node: widths[node] for node in held}:
        group = seat.group
        reason = (
            f"engine {seat.number} of worker_type {group.worker_type}, {group.ranks} devices from device {begin}, "
            f"would lie on parts of machines: {', '.join(parts)}"
        )
        remedy = "put groups of larger engines first, or a placeholder before it"
        yield Fault(group.place, f"num_gpus_per_engine {group.ranks}", reason, remedy)


def by_number(node: str) -> tuple[object, ...]:
    """Addresses before names, both by the numbers in them: 10.0.0.9 before 10.0.0.10, node-2 before node-10."""
    try:
        address = ipaddress.ip_address(node)
    except ValueError:
        words = re.split(r"([0-9]+)", node)
        return (1, tuple((word.isdecimal(), int(word) if word.isdecimal() else 0, word) for word in words))
    return (0, address.version, int(address))
