"""The launcher of SGLang servers on real processes, with small servers in SGLang's place."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from tests.unit.serving.test_sglang import awaited, spec
from turnout.core.errors import ConfigError, EngineDead, EngineError
from turnout.placement.real import RealClock
from turnout.serving import sglang_launcher
from turnout.serving.sglang_launcher import find_sglang, launch_sglang


@pytest.mark.parametrize(
    ("python", "reason"), [(sys.executable, "has no package sglang"), ("/none", "can't be run")]
)
@awaited
async def test_an_interpreter_without_sglang_is_named(python, reason):
    with pytest.raises(ConfigError, match=reason):
        await find_sglang(Path(python), RealClock())


def fake_python(folder: Path, server: str) -> Path:
    """An interpreter that has a `sglang.launch_server` which runs `server`."""
    package = folder / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(server)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={package.parent} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@awaited
async def test_a_server_that_ends_is_explained_by_its_last_error(tmp_path):
    python = fake_python(tmp_path, "raise ValueError('no such attention')")
    with pytest.raises(EngineDead, match=r"exit status 1(.|\n)*ValueError: no such attention"):
        await launch_sglang(spec(python=python, folder=tmp_path), RealClock())


@awaited
async def test_a_server_that_never_serves_is_stopped_at_the_deadline(tmp_path):
    code = f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    launch = spec(python=fake_python(tmp_path, code), folder=tmp_path, start_deadline_s=3.0)
    with pytest.raises(EngineError, match="waited 3 s for it to generate"):
        await launch_sglang(launch, RealClock())
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


SERVER = """
import http.server, os, sys
folder = os.environ["TMPDIR"]
given = sys.argv[1:]
key = open(given[given.index("--config") + 1]).read()
class Handler(http.server.BaseHTTPRequestHandler):
    tries = 0
    def do_GET(self):
        Handler.tries += 1
        loading = Handler.tries < 3
        self.send_response(503 if loading or self.headers["Authorization"] != "Bearer sesame" else 200)
        self.end_headers()
assert key == 'admin-api-key: "sesame"\\n', key
http.server.HTTPServer(("127.0.0.1", int(given[given.index("--port") + 1])), Handler).serve_forever()
"""


@awaited
async def test_it_is_served_once_a_token_was_made_and_nothing_is_left_after_stop(tmp_path):
    launch = spec(python=fake_python(tmp_path, SERVER), folder=tmp_path, key="sesame")
    engine = await launch_sglang(launch, RealClock())
    temporary = Path(f"/proc/{engine.process.pid}/cmdline").read_bytes().split(b"\0")
    folder = Path(temporary[temporary.index(b"--temporary") + 1].decode())
    assert (folder / "server.yaml").stat().st_mode & 0o077 == 0
    await engine.stop()
    assert not engine.process.alive and not folder.exists()


@awaited
async def test_rtr_23_a_port_that_was_taken_after_its_choice_is_chosen_anew(tmp_path, monkeypatch):
    launch = spec(python=fake_python(tmp_path, SERVER), folder=tmp_path, key="sesame")
    with socket.socket() as somebody:
        somebody.bind(("127.0.0.1", 0))
        somebody.listen()
        taken = somebody.getsockname()[1]
        ports = iter([taken, taken, sglang_launcher._free_port("127.0.0.1")])
        monkeypatch.setattr(sglang_launcher, "_free_port", lambda _: next(ports))
        engine = await launch_sglang(launch, RealClock())
        await engine.stop()
        assert engine.client.address.port != taken
        monkeypatch.setattr(sglang_launcher, "_free_port", lambda _: taken)
        with pytest.raises(EngineDead, match="Address already in use"):
            await launch_sglang(launch, RealClock())
