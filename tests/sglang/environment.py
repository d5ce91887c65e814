"""The environment in which a real SGLang runs on a CPU: pinned packages, PyTorch's CPU build, stand-ins.

Owns `$XDG_CACHE_HOME/turnout/sglang` (default ~/.cache), 3.3 GB. Promises: an environment is complete or absent; it
is named by everything it is made from, so a change of a pin or a stand-in makes a new one. TORCH_INDEX is PyTorch's
public CPU index where set, as in the Makefile.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
TORCH = HERE.parents[1] / "requirements-torch.txt"
STAND_INS = HERE / "stand_ins"
INSTALL_DEADLINE_S = 3600.0
SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"


def interpreter() -> Path:
    """The Python of the environment; makes it where it isn't there.

    Raises CalledProcessError or TimeoutExpired where an installation fails; nothing is left behind then."""
    folder = _cache() / _name()
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    print(f"making {folder}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _run([sys.executable, "-m", "venv", str(folder)])
        index = os.environ.get("TORCH_INDEX")
        _pip(python, "-r", str(TORCH), *(["--index-url", index] if index else []))
        _pip(python, "--no-deps", "-r", str(REQUIREMENTS))
        site = subprocess.run(
            [str(python), "-c", SITE], check=True, capture_output=True, text=True, timeout=60
        )
        shutil.copytree(STAND_INS, site.stdout.strip(), dirs_exist_ok=True)
        _run([str(python), "-c", "import sglang.launch_server"])
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    (folder / "complete").touch()
    return python


def _name() -> str:
    parts = [TORCH, REQUIREMENTS, *sorted(STAND_INS.rglob("*.py"))]
    made_from = b"".join(path.name.encode() + path.read_bytes() for path in parts)
    return hashlib.sha256(made_from + sys.version.encode()).hexdigest()[:12]


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "turnout" / "sglang"


def _pip(python: Path, *arguments: str) -> None:
    options = ["--quiet", "--disable-pip-version-check"]
    _run([str(python), "-m", "pip", "install", *options, *arguments])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=INSTALL_DEADLINE_S, stdout=sys.stderr)


if __name__ == "__main__":
    print(interpreter())
