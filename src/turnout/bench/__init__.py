"""Benchmarks and suites that are run against an engine from outside: black boxes only, HTTP in and out."""
