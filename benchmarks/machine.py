"""What a benchmark says of the machine and of itself. Linux; what can't be read is None."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("turnout", "torch", "transformers", "numpy")


def cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def describe() -> dict[str, Any]:
    """Machine, versions and load at this moment, for the JSON."""
    return {
        "cpu": _cpu_model(),
        "cpus": cpus(),
        "cpu_flags": _flags("amx_bf16", "avx512_bf16", "avx512f", "avx2"),
        "memory_gib": _memory_gib(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average_1m": round(os.getloadavg()[0], 2),
        "commit": _commit(),
        "versions": {name: metadata.version(name) for name in PACKAGES},
    }


def _cpuinfo(key: str) -> str | None:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _memory_gib() -> float | None:
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    return round(int(path.read_text().split()[1]) / 2**20, 1)  # the first line: MemTotal: N kB


def _cpu_model() -> str | None:
    return _cpuinfo("model name")


def _flags(*wanted: str) -> list[str]:
    found = (_cpuinfo("flags") or "").split()
    return [flag for flag in wanted if flag in found]


def _commit() -> str | None:
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False
    )
    return done.stdout.strip() or None
