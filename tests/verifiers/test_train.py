"""A run on an environment of the real `verifiers`, in an environment of its own: `make test-verifiers`.

The environment sees this one's packages and has verifiers and uv besides; verifiers' own chat program is made by uv
on first use. 600 MB under `$XDG_CACHE_HOME/turnout/verifiers` (default ~/.cache).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

PACKAGES = ("verifiers==0.4.0", "uv==0.13.9")
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
DEADLINE_S = 1800.0

pytestmark = pytest.mark.skipif(
    os.environ.get("TURNOUT_TEST_VERIFIERS") != "1",
    reason="the lane with the real verifiers: make test-verifiers (600 MB, needs a package index)",
)


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter; its environment is complete or absent."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(" ".join((*PACKAGES, sys.version, sys.prefix)).encode()).hexdigest()[:12]
    folder = cache / "turnout" / "verifiers" / name
    made = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=DEADLINE_S)
        site = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
        (site / "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        subprocess.run(
            [str(made), "-m", "pip", "install", "--quiet", *PACKAGES], check=True, timeout=DEADLINE_S
        )
        (folder / "complete").touch()
    return made


def test_an_environment_trains(python: Path, tmp_path: Path) -> None:
    """Each sample is one episode, its calls go to its own endpoint, its reward is the trace's."""
    run = tmp_path / "run"
    data = 'verifiers:toy_sums:{"taskset": {"num_tasks": 4}, "agent": {"harness": {"id": "null"}}}'
    words = [
        *("--hf-checkpoint", "tiny:llama", "--prompt-data", data, "--num-rollout", "2", "--lr", "1e-3"),
        *("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "24"),
        *("--rollout-max-context-len", "512", "--run-dir", str(run), "--rollout-timeout-s", "1200"),
        *("--engine-start-timeout-s", "600"),
    ]
    paths = os.pathsep.join([str(ROOT / "src"), str(HERE)])
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(python), "-m", "turnout.cli.main", "train", *words],
        env={**os.environ, "PYTHONPATH": paths, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=DEADLINE_S, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["groups"]["trained"] == 4, summary
    assert summary["audit"]["failed"] == 0 and summary["reward_last"] > 0
