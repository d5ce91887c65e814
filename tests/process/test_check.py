"""`turnout check examples/external/run.yaml` on real engines: every line is proved, each fault fails its line."""

from __future__ import annotations

import contextlib
import ctypes
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine_process import EngineProcess, serving
from tests.process.run_process import ROOT, environment
from turnout.cli import check
from turnout.train.model_zoo import tiny

NO_TORCH = ROOT / "tests" / "process" / "no_torch"
DEADLINE_S = "4"
Row = dict[str, Any]


@dataclass
class Site:
    """Engines as somebody else runs them: two healthy ones, one of another model."""

    root: Path
    model: Path
    urls: list[str]
    other: str
    engine: EngineProcess

    def words(self, *more: str, run: str = "external/run.yaml") -> list[str]:
        """A run of the examples, with options that win."""
        options = {
            "--hf-checkpoint": self.model,
            "--custom-rm-path": ROOT / "examples" / "tiny_reward.py:share_of_digits",
            "--prompt-data": ROOT / "examples" / "data" / "sums_train.jsonl",
            "--eval-prompt-data": ROOT / "examples" / "data" / "sums_heldout.jsonl",
            "--run-dir": self.root / "run",
            "--update-weight-disk-dir": self.root / "shared",
        }
        given = [str(word) for pair in options.items() for word in pair]
        return [str(ROOT / "examples" / run), "--deadline", DEADLINE_S, *given, *more]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("site")
    (root / "shared").mkdir()
    model = tiny(root / "model", "llama")
    flags = ("--allowed-root", str(root), "--max-total-tokens", "1024")
    started = []
    for at, served in enumerate((model, model, tiny(root / "other", "llama", seed=1))):
        work = root / f"engine-{at}"
        work.mkdir()
        started.append(EngineProcess(served, work, *flags, cwd=root))
    with serving(*started) as engines:
        first, second, other = (engine.url for engine in engines)
        yield Site(root, model, [first, second], other, engines[0])


@pytest.fixture
def looked(site: Site, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command on engines at these addresses; exit status and lines by name."""

    def run(urls: list[str], *more: str) -> tuple[int, dict[str, Row]]:
        status = check.command([*site.words("--rollout-external-engine-addrs", *urls, *more), "--json"])
        row = json.loads(capsys.readouterr().out)
        assert row["exit_status"] == status
        return status, {line["name"]: line for line in row["lines"]}

    return run


def failing(lines: dict[str, Row]) -> list[str]:
    return [name for name, line in lines.items() if line["result"] == "failed"]


def test_a_healthy_deployment_proves_every_line(site: Site, looked: Any) -> None:
    status, lines = looked(site.urls)
    assert {line["result"] for line in lines.values()} == {"proved"} and status == 0, lines
    assert {
        "addresses",
        "engine model",
        "engine dtype",
        "worker types",
        "shared directory",
        "disk space",
    } <= set(lines)
    assert [f["how"] for f in lines["shared directory"]["findings"]] == ["a nonce both ways"] * 2
    assert list((site.root / "shared").iterdir()) == [] and not (site.root / "run").exists()


def test_a_group_comes_together_and_leaves_nothing(site: Site, looked: Any) -> None:
    status, lines = looked(site.urls, "--update-weight-transport", "group", "--no-update-weight-disk-dir")
    assert status == 0 and "2 engines joined" in lines["process group"]["findings"][0]["how"], lines
    status, said = site.engine.call("/destroy_weights_update_group", {"group_name": "other"})
    assert status == 400 and said["message"].endswith("it is in []")


def place(url: str) -> str:
    return url.removeprefix("http://")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_an_address_that_is_down(site: Site, looked: Any) -> None:
    down = f"http://127.0.0.1:{free_port()}"
    status, lines = looked([site.urls[0], down])
    assert status == 1 and failing(lines) == ["addresses"], lines
    assert [(f["subject"], f["result"]) for f in lines["addresses"]["findings"]] == [
        (place(site.urls[0]), "proved"),
        (place(down), "failed"),
    ]


def test_another_model(site: Site, looked: Any) -> None:
    _, lines = looked([site.urls[0], site.other])
    assert failing(lines) == ["engine model"], lines


def test_another_dtype(site: Site, looked: Any) -> None:
    with relay(site.urls[1], tell=saying(dtype="float32")) as url:
        _, lines = looked([site.urls[0], url])
    assert failing(lines) == ["engine dtype"], lines


def test_wgt_20_another_mount(
    site: Site, looked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same path is another folder on each side: what /proc/self/cwd is depends on who looks."""
    monkeypatch.chdir(tmp_path)
    _, lines = looked(site.urls, "--update-weight-disk-dir", "/proc/self/cwd/shared")
    assert failing(lines) == ["shared directory"], lines
    assert "can't read the file there" in lines["shared directory"]["findings"][0]["how"]


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Half a megabyte at this folder, where the test may mount."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(words, check=False, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(site: Site, looked: Any) -> None:
    """A file system on which three versions have no room; else more versions than any has."""
    with small_disk(site.root / "small") as mounted:
        small = ("--update-weight-disk-dir", str(site.root / "small"))
        many = ("--update-weight-disk-keep-files", "--num-rollout", "100000000")
        _, lines = looked(site.urls, *(small if mounted else many))
    assert failing(lines) == ["disk space"], lines


def test_a_blocked_group_port(site: Site, looked: Any) -> None:
    """On the way to the engine the meeting point becomes a port that nobody reaches."""

    def block(path: str, body: Row) -> Row:
        return body | ({"master_port": free_port()} if path == "/init_weights_update_group" else {})

    with relay(site.urls[1], ask=block) as url:
        _, lines = looked([url], "--update-weight-transport", "group", "--no-update-weight-disk-dir")
    assert failing(lines) == ["process group"], lines
    assert "do not come together at 127.0.0.1:" in lines["process group"]["findings"][0]["how"]


def test_prefill_without_a_bootstrap_port(site: Site, looked: Any) -> None:
    prefill, decode = (saying(disaggregation_mode=mode) for mode in ("prefill", "decode"))
    with relay(site.urls[0], tell=prefill) as one, relay(site.urls[1], tell=decode) as two:
        _, lines = looked([one, two])
    assert failing(lines) == ["worker types"], lines


def test_flags_that_exclude_one_another(looked: Any, site: Site) -> None:
    status, lines = looked(site.urls, "--update-weight-mode", "delta", "--update-weight-transport", "tensor")
    assert status == 1 and failing(lines) == ["options"] == list(lines)


def test_a_directory_that_is_read_only(site: Site) -> None:
    """As a process of its own: without the right of root to write everywhere, and without torch."""
    sealed = site.root / "sealed"
    sealed.mkdir(mode=0o555)
    words = ("--update-weight-disk-dir", str(sealed), "--rollout-external-engine-addrs", *site.urls, "--json")
    rows = as_user(site.words(*words))
    assert failing(rows) == ["weight directory"], rows


def test_too_few_devices(site: Site, tmp_path: Path) -> None:
    """A run that starts two SGLangs beside its trainer, with one GPU to be seen. The package is an empty one."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    words = ["--engine", "sglang", "--rollout-num-engines", "2", "--json"]
    asked = site.words(*words, run="tiny.yaml")
    rows = as_user(asked, paths=[str(tmp_path)], CUDA_VISIBLE_DEVICES="0")
    assert failing(rows) == ["devices"], rows


def as_user(words: list[str], paths: Sequence[str] = (), **extra: str) -> dict[str, Row]:
    def give_up_overriding() -> None:
        ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE: fails for who has it not

    inherited = os.environ.get("PYTHONPATH", "")
    done = subprocess.run(
        [sys.executable, "-m", "turnout.cli.main", "check", *words],
        env=environment(PYTHONPATH=os.pathsep.join([str(NO_TORCH), *paths, inherited]), **extra),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        preexec_fn=give_up_overriding,
    )
    assert done.returncode in (0, 1, 3), done.stderr
    return {line["name"]: line for line in json.loads(done.stdout)["lines"]}


def test_a_probe_tells_of_no_other_file(site: Site) -> None:
    secret, mine = "5" * 32, "a" * 32
    (site.root / "secret").write_text(secret)
    (site.root / "shared" / f".turnout-probe-{mine}").symlink_to(site.root / "secret")
    asked = {"folder": str(site.root / "shared"), "theirs": mine, "mine": "b" * 32}
    for body in (
        asked,  # a link
        asked | {"folder": str(site.root.parent)},  # outside the allowed roots
        asked | {"folder": f"{site.root}/shared/../.."},
        asked | {"theirs": "../secret"},
        asked | {"mine": "../../x"},
        asked | {"folder": 5},
    ):
        status, said = site.engine.call("/probe_folder", body)
        assert status == 400 and secret not in json.dumps(said), (body, said)
    (site.root / "shared" / f".turnout-probe-{mine}").unlink()
    (site.root / "shared" / f".turnout-probe-{mine}").write_text("a line of somebody else's\n")
    status, said = site.engine.call("/probe_folder", asked)
    assert status == 400 and "somebody" not in json.dumps(said)
    (site.root / "shared" / f".turnout-probe-{mine}").unlink()
    assert list((site.root / "shared").iterdir()) == []


Change = Callable[[str, Row], Row]


def saying(**claims: Any) -> Change:
    """What an engine says of itself, with other claims."""
    return lambda path, row: row | (claims if path == "/server_info" else {})


@contextlib.contextmanager
def relay(url: str, ask: Change | None = None, tell: Change | None = None) -> Iterator[str]:
    """A server before an engine that changes what is asked or told, by path."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass(None)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._pass(json.dumps(body if ask is None else ask(self.path, body)).encode())

        def _pass(self, data: bytes | None) -> None:
            request = urllib.request.Request(url + self.path, data, {"Content-Type": "application/json"})
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            try:
                with opener.open(request, timeout=60) as reply:
                    status, said = reply.status, reply.read()
            except urllib.error.HTTPError as fault:
                with fault:
                    status, said = fault.code, fault.read()
            if tell is not None and said:
                said = json.dumps(tell(self.path, json.loads(said))).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
