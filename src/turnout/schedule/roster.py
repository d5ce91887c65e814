"""The engines of a run as its configuration asks for them. Pure; the one place where this is decided."""

from __future__ import annotations

from turnout.config.run_config import RunConfig
from turnout.serving.roster import EnginePlan, Program


def roster(config: RunConfig) -> tuple[EnginePlan, ...]:
    """Every engine that the run starts or connects to, in a fixed order, each with an id of its own."""
    program, ranks = Program(config.engine), config.rollout_num_gpus_per_engine
    engines = range(config.rollout_num_engines)
    return tuple(
        EnginePlan(
            f"engine-{i}", program=program, ranks=ranks, devices=tuple(range(i * ranks, (i + 1) * ranks))
        )
        for i in engines
    )
