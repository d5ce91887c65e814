"""Which halves of PD pairs may be asked: those whose other half holds the very same version."""

from __future__ import annotations

from dataclasses import replace

import pytest

from turnout.core.errors import WeightError
from turnout.core.version import VersionConstraint, WeightVersion
from turnout.placement.real import RealClock
from turnout.serving.address import Address
from turnout.serving.client import EngineClient
from turnout.serving.roster import WorkerType
from turnout.transfer.fleet import Fleet
from turnout.weights.routing import Held

OLD, NEW = Held(WeightVersion(0, 1, "a" * 32), 1), Held(WeightVersion(0, 2, "b" * 32), 2)


class Silent:
    def emit(self, event: object) -> None: ...


@pytest.fixture
def fleet() -> Fleet:
    made = Fleet([client(name) for name in ("p0", "p1", "d0", "d1")], Silent(), None, 1)
    made.current = OLD
    for name in made.engines:
        made.hold(name, OLD)
    return made


def client(name: str) -> EngineClient:
    made = EngineClient(name, Address("127.0.0.1", 1), RealClock())
    kind = WorkerType.PREFILL if name.startswith("p") else WorkerType.DECODE
    made.plan = replace(made.plan, worker_type=kind)
    return made


def asked(fleet: Fleet, minimum: VersionConstraint | None = None) -> dict[str, list[str]]:
    engines = fleet.routable(minimum)
    return {engine.engine_id: [one.engine_id for one in fleet.prefills(engine)] for engine in engines}


def test_decode_engines_are_asked_with_prefill_engines_of_their_version(fleet: Fleet) -> None:
    assert asked(fleet) == {"d0": ["p0", "p1"], "d1": ["p0", "p1"]}
    assert [plan.engine_id for plan in fleet.answering()] == ["d0", "d1"]
    fleet.current = NEW
    fleet.hold("p1", NEW)
    fleet.hold("d1", NEW)
    assert asked(fleet) == {"d0": ["p0"], "d1": ["p1"]}
    assert asked(fleet, VersionConstraint(NEW.version.label, exact=True)) == {"d1": ["p1"]}
    fleet.activate("p0")
    assert asked(fleet) == {"d1": ["p1"]}
    fleet.hold("p0", NEW)
    assert asked(fleet) == {"d1": ["p0", "p1"]}


def test_rtr_20_without_a_half_no_engine_may_be_asked(fleet: Fleet) -> None:
    fleet.lost("p0", "killed")
    assert asked(fleet) == {"d0": ["p1"], "d1": ["p1"]}
    fleet.lost("p1", "killed")
    with pytest.raises(WeightError, match="fenced: p0, p1"):
        fleet.routable()
    assert not fleet.any_routable() and not fleet.enough(fleet.required())
    fleet.min_engines = 1
    assert not fleet.enough(["d0", "d1"]) and fleet.enough(["p1", "d0"])
    fleet.add(client("p1"))
    fleet.hold("p1", OLD)
    assert asked(fleet) == {"d0": ["p1"], "d1": ["p1"]}
