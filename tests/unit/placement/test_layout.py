"""Which devices trainer and engines get: the table of sizes, the order of devices, engines that are whole."""

from __future__ import annotations

from itertools import chain
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnout.config.server_groups import Group
from turnout.core.errors import ConfigError
from turnout.placement.layout import Device, Sizes, Wanted, ordered, place, sizes


def group(num_gpus: int, ranks: int = 1, worker: str = "regular") -> Group:
    return Group(f"g.yaml: model a, group 1 ({worker})", "a", "a", worker, num_gpus, ranks, "embedded", True)  # type: ignore[arg-type]


def machines(*widths: int) -> list[Device]:
    return [Device(f"10.0.0.{node}", index) for node, width in enumerate(widths, 1) for index in range(width)]


TABLE = [
    ({"only": "train"}, 32, Sizes(16, 16, 16)),
    ({"only": "train", "external": True}, 32, Sizes(16, 16, 16)),
    ({"only": "rollout", "external": True}, 32, Sizes(0, 0, 0)),
    ({"external": True}, 32, Sizes(16, 16, 16)),
    ({"external": True, "colocate": True}, 32, Sizes(16, 16, 16)),
    ({"only": "rollout"}, 32, Sizes(32, 0, 0)),
    ({"only": "rollout", "colocate": True}, 8, Sizes(8, 0, 0)),
    ({"colocate": True}, 8, Sizes(16, 16, 0)),
    ({"colocate": True}, 16, Sizes(16, 16, 0)),
    ({"colocate": True}, 32, Sizes(32, 16, 0)),
    ({"colocate": True}, 0, Sizes(16, 16, 0)),
    ({}, 32, Sizes(48, 16, 16)),
    ({}, 0, Sizes(16, 16, 16)),
]


@pytest.mark.parametrize(("how", "rollout", "expected"), TABLE)
def test_cfg_07_sizes_of_a_trainer_of_16(how, rollout, expected):
    assert sizes(Wanted(16, (group(rollout),) if rollout else (), **how)) == expected


@pytest.mark.parametrize(("actor", "rollout"), [(2, 1), (1, 2)])
def test_colocated_halves_of_unequal_sizes_begin_at_one_device(actor, rollout):
    layout = place(Wanted(actor, (group(rollout),), colocate=True), machines(2))
    assert [device.index for device in layout.actor] == list(range(actor))
    assert [seat.devices[0].index for seat in layout.seats] == list(range(rollout))


def test_cfg_04_devices_are_ordered_as_numbers():
    found = [
        ("10.0.0.10", "0"),
        ("10.0.0.2", "10"),
        ("10.0.0.2", "2"),
        ("node-10", 0),
        ("node-9", 1),
        ("::1", 0),
    ]
    assert [(device.node, device.index) for device in ordered(found)] == [
        ("10.0.0.2", 2), ("10.0.0.2", 10), ("10.0.0.10", 0), ("::1", 0), ("node-9", 1), ("node-10", 0),
    ]  # fmt: skip
    for wrong, said in (([("a", "GPU-1")], "is no number"), ([("a", 1), ("a", "1")], "is there 2 times")):
        with pytest.raises(ConfigError, match=said):
            ordered(wrong)


def test_groups_follow_the_trainer_and_a_placeholder_keeps_its_devices_free():
    groups = (group(2), group(1, worker="placeholder"), group(4, 2))
    layout = place(Wanted(1, groups), machines(8))
    assert [device.index for device in layout.actor] == [0]
    assert [[d.index for d in seat.devices] for seat in layout.seats] == [[1], [2], [4, 5], [6, 7]]


def test_an_engine_of_several_whole_machines():
    layout = place(Wanted(4, (group(16, 8), group(4, 2))), machines(4, 4, 4, 4, 4, 4))
    assert [seat.nodes for seat in layout.seats] == [
        ("10.0.0.2", "10.0.0.3"), ("10.0.0.4", "10.0.0.5"), ("10.0.0.6",), ("10.0.0.6",),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "widths", "said"),
    [
        (Wanted(0, (group(4, 2, "prefill"), group(4, 2, "decode")), only="rollout"), (6,),
         r"\(decode\) = num_gpus 4: worker_type decode begins at device 4 with 2 engines of 2: 8 are required, "
         "6 are available"),
        (Wanted(8, ()), (4,), "the trainer needs 8 devices, 4 are available"),
        (Wanted(1, (group(6, 4),)), (8,), "num_gpus 6: engines of 4 do not divide it -> per engine fit: 1, 2, 3"),
        (Wanted(1, (group(4, 4),)), (4, 4),
         "engine 0 of worker_type regular, 4 devices from device 1, would lie on parts of machines: 3 of 4 of "
         "10.0.0.1, 1 of 4 of 10.0.0.2"),
    ],
)  # fmt: skip
def test_cfg_02_what_does_not_fit_is_told_with_all_values(wanted, widths, said):
    with pytest.raises(ConfigError, match=said):
        place(wanted, machines(*widths))


@given(
    seed=st.integers(0, 2**32),
    width=st.sampled_from([1, 2, 4, 8]),
    engines=st.lists(st.tuples(st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 3)), min_size=1, max_size=4),
    colocate=st.booleans(),
)
def test_no_device_twice_every_engine_whole_whatever_the_order(seed, width, engines, colocate):
    """Powers of two, the largest first, always fit."""
    groups = tuple(group(ranks * count, ranks) for ranks, count in sorted(engines, reverse=True))
    wanted = Wanted(16, groups, colocate)
    devices = machines(*[width] * -(-sizes(wanted).total // width))
    layout = place(wanted, devices)
    shuffled = list(devices)
    Random(seed).shuffle(shuffled)
    assert place(wanted, shuffled) == layout
    taken = list(chain.from_iterable(seat.devices for seat in layout.seats))
    assert len(set(taken)) == len(taken) == sum(ranks * count for ranks, count in engines)
    assert colocate or not set(taken) & set(layout.actor)
    for seat in layout.seats:
        assert len(seat.devices) == seat.group.ranks
        assert len(seat.nodes) == max(1, seat.group.ranks // width)
