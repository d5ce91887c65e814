"""How far rollouts may lead training, as arithmetic on slots. Pure.

A group takes a slot when it is admitted and gives it back when the version that was made from it is committed, or
when it is dropped. B slots, P groups a step, a window W (at most W - 1 younger groups overtake a slow one) and
engines that may serve versions E train steps behind bound the lag of every group when it is taken:

    lag <= (B + W - 2) // P + E                      (proof: docs/staleness.md)
"""

from __future__ import annotations


def lead_bound(slots: int, window: int, per_step: int, engine_lag: int = 0) -> int:
    """The largest lag that a group can have when it is taken."""
    return (slots + window - 2) // per_step + engine_lag


def slots_for(lead: int, window: int, per_step: int, engine_lag: int = 0) -> int:
    """The most slots with which `lead_bound` is at most `lead`; less than `per_step` where there is no such number:
    then no step could ever be filled."""
    return (lead - engine_lag + 1) * per_step - window + 1
