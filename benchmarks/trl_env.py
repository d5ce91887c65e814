"""The environments in which TRL runs: one with the current transformers, one with vLLM's CPU build.

Owns `$XDG_CACHE_HOME/turnout/benchmarks` (default ~/.cache). Promises: an environment is complete or absent; it
is named by its requirements, so a change of a pin makes a new one. TORCH_INDEX is PyTorch's public CPU index
where set, as in the Makefile; vLLM's build links against that torch. About 5 GB in all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TORCH = HERE.parent / "requirements-torch.txt"
REQUIREMENTS = {"trl": HERE / "trl-requirements.txt", "trl-vllm": HERE / "trl-vllm-requirements.txt"}
INSTALL_DEADLINE_S = 1800.0


def environment_of(mode: str) -> str:
    """Which environment a generation mode of `trl_side` runs in."""
    return "trl-vllm" if mode.startswith("vllm") else "trl"


def interpreter(name: str) -> Path:
    """The Python of an environment; makes it where it isn't there.

    Raises CalledProcessError or TimeoutExpired where an installation fails; nothing is left behind then."""
    digest = hashlib.sha256(TORCH.read_bytes() + REQUIREMENTS[name].read_bytes()).hexdigest()[:12]
    folder = _cache() / f"{name}-{digest}"
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    print(f"making {folder}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _run([sys.executable, "-m", "venv", str(folder)])
        index = os.environ.get("TORCH_INDEX")
        _pip(python, "-r", str(TORCH), *(["--index-url", index] if index else []))
        _pip(python, "--no-deps", "-r", str(REQUIREMENTS[name]))
        _run([str(python), "-c", "from trl import GRPOTrainer"])
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    (folder / "complete").touch()
    return python


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "turnout" / "benchmarks"


def _pip(python: Path, *arguments: str) -> None:
    options = ["--quiet", "--disable-pip-version-check"]
    _run([str(python), "-m", "pip", "install", *options, *arguments])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=INSTALL_DEADLINE_S, stdout=sys.stderr)
