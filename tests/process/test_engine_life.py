"""How an engine process starts and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch

from tests.engine_models import make_model
from tests.engine_process import engine

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", torch.bfloat16)


def wait_until(done) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return open(f"/proc/{pid}/stat").read().split()[2] != "Z"  # noqa: PTH123
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_an_engine_ends_with_its_parent(model, tmp_path):
    ready = tmp_path / "ready.json"
    parent = (
        "import subprocess, sys, time; "
        f"p = subprocess.Popen([sys.executable, '-m', 'turnout.engine', '--model-path', {str(model)!r}, "
        f"'--ready-file', {str(ready)!r}]); print(p.pid, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    try:
        wait_until(ready.exists)
        assert alive(pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        process.stdout.close()
    wait_until(lambda: not alive(pid))


def test_a_wrong_parent_pid_ends_it_at_once(model):
    command = [sys.executable, "-m", "turnout.engine", "--model-path", str(model), "--parent-pid", "1"]
    if os.getpid() == 1:
        pytest.skip("the tests run as process 1")
    assert subprocess.run(command, timeout=DEADLINE_S, check=False, capture_output=True).returncode == 1


def test_beyond_loopback_control_needs_the_token(model, tmp_path):
    bare = [sys.executable, "-m", "turnout.engine", "--model-path", str(model), "--host", "0.0.0.0"]
    refused = subprocess.run(bare, timeout=DEADLINE_S, check=False, capture_output=True, text=True)
    assert refused.returncode == 2 and "token" in refused.stderr
    secret = {"TURNOUT_ENGINE_ADMIN_TOKEN": "open sesame"}
    with engine(model, tmp_path, "--host", "0.0.0.0", env=secret) as server:
        server.url = server.url.replace("0.0.0.0", "127.0.0.1")
        assert server.generate([5, 6], 2)[0] == 200 and server.call("/weight_version")[0] == 200
        calls = (
            "abort_request",
            "pause_generation",
            "continue_generation",
            "flush_cache",
            "update_weights_from_disk",
        )
        for path in calls:
            for token in (None, "", "open", "open sesame!", "\u00fc"):
                assert server.call(f"/{path}", {}, token)[0] == 401, (path, token)
        assert server.call("/abort_request", {"rid": "x"}, "open sesame")[0] == 200
        row = {"model_path": str(tmp_path)}
        status, reply = server.call("/update_weights_from_disk", row, "open sesame")
        assert status == 400 and "outside the folders" in reply["message"]
        assert "sesame" not in server.log.read_text()
        assert server.stop() == 0


def test_a_dead_compute_thread_ends_the_process(model, tmp_path):
    script = f"""
import logging
from pathlib import Path
from turnout.engine.main import Lifetime, run_engine
from turnout.engine.runner import Runner
from turnout.engine.settings import EngineSettings
logging.basicConfig(level=logging.INFO)
def crash(self, step):
    raise MemoryError("planted")
Runner.run = crash
run_engine(EngineSettings(Path({str(model)!r})), Lifetime(Path({str(tmp_path / "ready")!r})))
"""
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    wait_until((tmp_path / "ready").exists)
    url = __import__("json").loads((tmp_path / "ready").read_text())["url"]
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        urllib.request.urlopen(f"{url}/health_generate", timeout=30)
    _, errors = process.communicate(timeout=30)
    assert (
        process.returncode == 70
        and "compute thread of engine engine-0 died: MemoryError('planted')" in errors
    )


def test_an_unusable_model_or_port_is_one_clear_line(model, tmp_path):
    base = [sys.executable, "-m", "turnout.engine", "--model-path"]
    missing = subprocess.run(
        [*base, str(tmp_path)], timeout=DEADLINE_S, check=False, capture_output=True, text=True
    )
    assert missing.returncode == 2 and "has no config.json" in missing.stderr
    assert "Traceback" not in missing.stderr
