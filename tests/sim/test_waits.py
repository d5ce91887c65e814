"""The chain of waits in virtual worlds: while an engine stands still it is the root, whatever the schedule."""

from __future__ import annotations

import pytest

from turnout.core.waits import root_cause
from turnout.schedule.stall_watch import Parties
from turnout.sim.plan import SCHEDULE_NAMES, plan_of
from turnout.sim.world import World, WorldOptions

STANDS_AT_S, LOOK_S, LONGER_S = 60.0, 5.0, 40.0


def chain(world):
    """What the controller's watch would see now."""
    controller = world.controller
    if controller is None or controller._plane is None or controller._updater is None:
        return None
    engines, pool = controller._updater.fleet.engines.values, controller._plane.pool
    parties = Parties(controller._phases, engines, dict, controller._thread, pool)
    return root_cause(parties.waits())


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_an_engine_that_stands_still_is_the_root(schedule, tmp_path):
    world = World(1, plan_of(1, schedule, deterministic=False), WorldOptions(()), tmp_path)
    seen = []

    def look():
        found, at = chain(world), world.loop.time()
        if found is not None:
            seen.append((at, found.key[-1] if found.waits else "", at - found.since, found.circle))
        world.later(LOOK_S, look)

    def stand(slowed):
        for engine in world.engines:
            engine.slowed = slowed

    look()
    world.later(STANDS_AT_S, stand, 1e6)
    world.later(STANDS_AT_S + LONGER_S + 1, stand, 1.0)
    world.loop.run_until_complete(world.live())
    world.loop.discard()
    assert not any(circle for *_, circle in seen)
    stood = [root for at, root, seconds, _ in seen if 0 <= at - STANDS_AT_S < LONGER_S + 1 and seconds > 20]
    assert stood and all(root.startswith("engine ") for root in stood), stood
    before = [seconds for at, root, seconds, _ in seen if at < STANDS_AT_S and root.startswith("engine ")]
    assert max(before, default=0.0) < 30, "nothing stalls before"
