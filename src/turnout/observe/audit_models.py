"""Frozen models in a run's events: the rule that they stayed (see `audit`), and what the summary tells of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from turnout.core.events import EngineLost, Event, ModelAttested, RunStarted, StepTrained
from turnout.observe.audit_log import ended_well, of_kind


def frozen_models_stay(log: Sequence[Event]) -> Iterator[str]:
    """Invariant 5, of models that take no updates: an engine of a frozen model attests the same weights in all of
    its lives, and once more after the last train step of a run that ended well, unless it had ended by then."""
    first: dict[str, ModelAttested] = {}
    open_ends: dict[str, None] = {}
    for event in log:
        if isinstance(event, RunStarted):
            open_ends.clear()  # whom the incarnation before had started
        elif isinstance(event, ModelAttested):
            was = first.setdefault(event.engine, event)
            if (was.root, was.level) != (event.root, event.level):
                yield f"engine {event.engine} of the model {event.model} held {was.root}, then {event.root}"
            open_ends.pop(event.engine, None)
        elif isinstance(event, EngineLost):
            open_ends.pop(event.engine, None)
        elif isinstance(event, StepTrained):
            open_ends |= dict.fromkeys(first)
    if ended_well(log):
        for engine in open_ends:
            yield f"engine {engine} of the model {first[engine].model} did not attest again at the end"


def models_summary(events: Iterable[Event]) -> dict[str, Any]:
    """`models`: by name, the engines of a frozen model with the digest that each attested first, how that was
    computed, how often it attested, and whether it was the same every time."""
    models: dict[str, dict[str, Any]] = {}
    for event in of_kind(list(events), ModelAttested):
        told = models.setdefault(event.model, {}).setdefault(
            event.engine, {"root": event.root, "level": event.level, "attested": 0, "stayed": True}
        )
        told["attested"] += 1
        told["stayed"] = told["stayed"] and told["root"] == event.root
    return {"models": models}
