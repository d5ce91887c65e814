"""Builds and loads the C files of this folder as one shared library, once per machine and source.

Promises: `library()` never raises; it returns None where there is no compiler or TURNOUT_NATIVE=0, and
`path_taken()` says why. The library is cached under a name made of the sources, the compiler and the
processor's features, written beside and renamed, so that parallel builds cannot harm one another.

OpenMP: import torch before the first call where torch is used at all: both then share one libgomp and one
thread pool (two pools on the same cores are up to 100 times slower).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC", "-std=gnu11")
BUILD_DEADLINE_S = 120.0


def _sources() -> list[Path]:
    """C files and the headers that they share."""
    return sorted(Path(__file__).parent.glob("*.[ch]"))


def _processor() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    return next((line for line in info.splitlines() if line.startswith(("flags", "Features"))), "")


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "turnout" / "native"


def _build(compiler: str) -> Path:
    sources = _sources()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=False)
    key = hashlib.sha256("\0".join([version.stdout, _processor(), *FLAGS]).encode())
    for source in sources:
        key.update(source.read_bytes())
    target = _cache_folder() / f"turnout-{key.hexdigest()[:20]}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / "out.so"
        command = [
            compiler,
            *FLAGS,
            "-o",
            str(built),
            *(str(source) for source in sources if source.suffix == ".c"),
            "-lm",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_DEADLINE_S, check=False)
        if done.returncode != 0:
            raise OSError(f"{compiler} ended with {done.returncode}: {done.stderr.strip()[-400:]}")
        built.replace(target)
    return target


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("TURNOUT_NATIVE") == "0":
        return None, "NumPy paths: TURNOUT_NATIVE=0"
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None, "NumPy paths: no C compiler (cc, gcc or clang) was found"
    try:
        path = _build(compiler)
        return ctypes.CDLL(str(path)), f"C paths from {path.name}"
    except (OSError, subprocess.SubprocessError) as fault:
        return None, f"NumPy paths: the C files could not be built ({fault})"


def library() -> ctypes.CDLL | None:
    """The loaded library, or None. The path taken is logged once."""
    return _load()[0]


@functools.cache
def path_taken() -> str:
    """One sentence on which path is used and why, for the log and for `server_info`."""
    sentence = _load()[1]
    log.info("%s", sentence)
    return sentence
