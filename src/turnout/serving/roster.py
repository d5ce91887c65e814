"""What each engine of a run is, before it is started: a plan. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

ACTOR = "default"  # the name of the model that is trained, where no file names it


class WorkerType(StrEnum):
    """What part of a request an engine does: all of it, the prompt, or the tokens after the first."""

    REGULAR = "regular"
    PREFILL = "prefill"
    DECODE = "decode"


class Program(StrEnum):
    """Who runs the engine: a program of ours, SGLang started by the run, or somebody else (at `address`)."""

    EMBEDDED = "embedded"
    SGLANG = "sglang"
    EXTERNAL = "external"


@dataclass(frozen=True)
class EnginePlan:
    """One engine. `model` names what it serves and `model_path` is where from (None: the run's --hf-checkpoint);
    `updated`: whether weight updates go to it; `ranks`: its tensor parallel ranks, `devices` theirs (empty: not
    assigned); `overrides`: options of its program, by name without dashes; `running`: requests that it runs at once
    (infinite: nobody said; None: --engine-max-running-requests); `address`: of an external one."""

    engine_id: str
    model: str = ACTOR
    worker_type: WorkerType = WorkerType.REGULAR
    program: Program = Program.EMBEDDED
    model_path: str | None = None
    updated: bool = True
    ranks: int = 1
    devices: tuple[int, ...] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    running: float | None = None
    address: str | None = None


def sides(plans: Iterable[EnginePlan]) -> tuple[frozenset[str], ...]:
    """The ids of the prefill engines and those of the decode engines, of each of which one is needed; nothing where
    every engine does all of a request."""
    split: dict[WorkerType, set[str]] = {WorkerType.PREFILL: set(), WorkerType.DECODE: set()}
    for plan in plans:
        if plan.worker_type is not WorkerType.REGULAR:
            split[plan.worker_type].add(plan.engine_id)
    return tuple(map(frozenset, split.values())) if any(split.values()) else ()
