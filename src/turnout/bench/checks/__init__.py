"""The checks, in the order in which they run."""

# isort: off
from turnout.bench.checks import (
    generation,
    logprobs,
    sampling,
    stopping,
    requests,
    aborts,
    pauses,
    updates,
    refusals,
)

__all__ = [
    "aborts",
    "generation",
    "logprobs",
    "pauses",
    "refusals",
    "requests",
    "sampling",
    "stopping",
    "updates",
]
