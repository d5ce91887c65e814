"""A run through a real router: what comes back is what engines made, also when an engine and the router die."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.process.run_process import TINY, ended, gone_within, of_kind, start, train, wait_for

KINDS = {
    "smg": ("smg", "setproctitle"),
    "sglang-router": ("sglang_router", "setproctitle", "orjson", "fastapi", "opentelemetry"),
}
WORDS = (
    "--deterministic", "--trainer-threads", "1", "--engine-threads", "1", "--rollout-num-engines", "2",
    "--use-fault-tolerance", "--num-rollout", "5", "--no-plots", "--skip-eval-before-train",
    "--rollout-max-response-len", "160", "--rollout-min-response-len", "160",
)  # fmt: skip


def installed(kind: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in KINDS[kind])


def needs(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not installed(kind), reason=f"{kind} is not installed (pip install {kind})")


def digests(run: Path) -> dict[str, str]:
    return {row["group"]: row["digest"] for row in of_kind(run, "GroupCompleted")}


@needs("smg")
def test_a_run_through_a_router_that_dies_makes_the_tokens_of_one_without(tmp_path: Path) -> None:
    run, direct = tmp_path / "run", tmp_path / "direct"
    words = ("--router", "smg", "--router-log-level", "info", *WORDS)
    process = start("train", str(TINY), "--run-dir", str(run), *words)
    wait_for("a version of the run", lambda: of_kind(run, "VersionPublished"), process)
    os.kill(of_kind(run, "EngineReady")[1]["pid"], signal.SIGKILL)
    wait_for("two more", lambda: len(of_kind(run, "VersionPublished")) > 2, process)
    guard = of_kind(run, "RouterReady")[0]["pid"]
    [router] = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
    os.kill(int(router), signal.SIGKILL)
    status, out, err = ended(process)
    assert status == 0, err
    assert gone_within(run, 5) == []
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["audit"]["failed"] == 0, summary["audit"]
    assert summary["groups"]["lost"] == 0
    [lost] = of_kind(run, "RouterLost")
    assert "exit status 137" in lost["reason"] and len(of_kind(run, "RouterReady")) == 2, lost
    assert "it is started again in 1 s" in out + err
    log = re.sub(r"\x1b\[[0-9;]*m", "", (run / "engines" / "router.log").read_text())
    asked = re.findall(r"path=/generate.*started processing", log)
    assert len(asked) > 5 * 4 * 8, "every sample goes through the router"
    assert train(direct, *WORDS)[0] == 0
    assert digests(run) == digests(direct)
