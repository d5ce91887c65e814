"""Guards of the production's code, each switched off from outside by one wrong function.

A world that does not notice is worth nothing: each of these must show within 200 seeds (`turnout simulate
--sabotage NAME`). The wrong functions are in turnout.sim.sabotage_rollout and turnout.sim.sabotage_weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from turnout.sim.sabotage_rollout import ROLLOUT_SABOTAGES
from turnout.sim.sabotage_weights import WEIGHT_SABOTAGES, Sabotage

SABOTAGES: dict[str, Sabotage] = WEIGHT_SABOTAGES | ROLLOUT_SABOTAGES


def switch_off(name: str) -> Callable[[], None]:
    """Switches one guard off in this process; what is returned switches it on again."""
    found = SABOTAGES[name]
    real = found.owner.__dict__[found.attribute]
    setattr(found.owner, found.attribute, found.wrong(real))
    return lambda: setattr(found.owner, found.attribute, real)


@contextmanager
def sabotaged(name: str) -> Iterator[None]:
    """One guard is off within."""
    switch_on = switch_off(name)
    try:
        yield
    finally:
        switch_on()
