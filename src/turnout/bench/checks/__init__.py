"""The checks, in the order in which they run."""

from turnout.bench.checks import generation, logprobs, sampling, stopping

__all__ = ["generation", "logprobs", "sampling", "stopping"]
