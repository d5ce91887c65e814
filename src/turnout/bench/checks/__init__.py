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
    deltas,
    refusals,
    tensors,
    groups,
    contents,
    openai,
    pairs,
    routed,
)

__all__ = [
    "aborts",
    "contents",
    "deltas",
    "generation",
    "groups",
    "logprobs",
    "openai",
    "pairs",
    "pauses",
    "refusals",
    "requests",
    "routed",
    "sampling",
    "stopping",
    "tensors",
    "updates",
]
