"""Benchmarks: each `python -m benchmarks.NAME --json FILE` measures both sides in one run."""
