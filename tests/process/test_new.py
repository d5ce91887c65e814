"""What `turnout new` writes runs as it is, on a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.process.run_process import ROOT, ended, environment, whole

SHORT = ("--hf-checkpoint", "tiny:llama", "--num-rollout", "3", "--skip-eval-before-train", "--no-plots")


def test_a_new_run_trains(tmp_path: Path) -> None:
    """With turns and a reward of its own, by their paths beside run.yaml."""
    program = (sys.executable, "-m", "turnout.cli.main")
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    around = {"env": environment(PYTHONPATH=path), "text": True}
    written = ("new", str(tmp_path / "mine"), "--task", "multi-turn")
    subprocess.run([*program, *written], check=True, timeout=60, stdout=subprocess.DEVNULL, **around)
    words = ("train", "run.yaml", "--run-dir", "kept", "--engine-threads", "1", *SHORT)
    process = subprocess.Popen(
        [*program, *words],
        cwd=tmp_path / "mine",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **around,
    )
    status, _, err = ended(process)
    whole(tmp_path / "mine" / "kept", status, err)
