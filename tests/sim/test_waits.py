"""Chains of waits in virtual worlds: while engines stand still one of them is the root, whatever the schedule."""

from __future__ import annotations

import pytest

from turnout.core.waits import root_cause
from turnout.schedule.stall_watch import Parties
from turnout.sim.plan import SCHEDULE_NAMES, plan_of
from turnout.sim.report import WorldOptions
from turnout.sim.world import World

LOOK_S, LONGER_S = 1.0, 40.0


def chain(world):
    """What the controller's watch would see now."""
    controller = world.controller
    if controller is None or controller._plane is None or controller._updater is None:
        return None
    engines, pool = controller._updater.fleet.engines.values, controller._plane.pool
    parties = Parties(controller._phases, engines, dict, controller._thread, pool)
    return root_cause(parties.waits())


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_engines_that_stand_still_are_the_root(schedule, tmp_path):
    """They stop in the middle of a rollout that is waited for."""
    world = World(1, plan_of(1, schedule, deterministic=False), WorldOptions(()), tmp_path)
    seen, began = [], []

    def look():
        found = chain(world)
        if found is not None:
            assert not found.circle
            seen.append((world.loop.time(), found.key, world.loop.time() - found.since))
            if not began and found.key[:1] == ("rollout",) and found.key[-1].startswith("engine "):
                began.append(world.loop.time())
                stand(1e6)
                world.later(LONGER_S, stand, 1.0)
        world.later(LOOK_S, look)

    def stand(slowed):
        for engine in world.engines:
            engine.slowed = slowed

    look()
    world.loop.run_until_complete(world.live())
    world.loop.discard()
    stood = [key for at, key, seconds in seen if began[0] < at < began[0] + LONGER_S and seconds > 20]
    assert stood and all(key[0] == "rollout" and key[1].startswith("group ") for key in stood), stood
    assert all(key[-1].startswith("engine ") for key in stood), stood
    assert all(seconds < 20 for at, key, seconds in seen if at < began[0]), "nothing stalls before"
