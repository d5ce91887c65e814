"""`turnout model push` against a hub that is a small HTTP server on this machine."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from turnout.cli.main import main
from turnout.cli.model_push import push
from turnout.core.errors import DataError, ModelError
from turnout.core.version import WeightVersion
from turnout.observe.model_card import model_card

CONFIG = {
    "hf_checkpoint": "tiny:llama", "lr": 0.001, "schedule": "async", "seed": 7,
    "custom_rm_path": "/home/x/mine.py:good",
    "prompt_data": "/data/secret/rows.jsonl", "update_weight_disk_dir": None, "admin_token_env": "KEY",
    "trl_rewards": {"/home/x/r.py:f": 0.5},
}  # fmt: skip
SUMMARY = {"steps": 4, "reward_first": 0.05, "reward_last": 0.5, "eval_before": None}


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks for when it makes a repository and a commit; `files` is what it was given."""

    files: dict[str, bytes]
    keys: set[str | None]
    allowed: bool
    private: bool

    def do_GET(self) -> None:
        self._answer(
            200 if self.allowed else 404,
            {"id": "me/made", "private": self.private, "siblings": [], "tags": []},
        )

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.keys.add(self.headers.get("Authorization"))
        if self.path.startswith("/api/repos/create"):
            status, row = (
                (200, {"url": "https://huggingface.co/me/made"}) if self.allowed else (403, {"error": "no"})
            )
        elif "/preupload/" in self.path:
            status, row = 200, {"files": [{**f, "uploadMode": "regular", "shouldIgnore": False}
                                          for f in json.loads(body)["files"]]}  # fmt: skip
        elif "/commit/" in self.path:
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            status, row = (
                200,
                {
                    "success": True,
                    "commitOid": "0" * 40,
                    "commitUrl": "https://huggingface.co/me/made/commit/0",
                },
            )
        else:
            status, row = 200, {}
        self._answer(status, row)

    def _answer(self, status: int, row: Any) -> None:
        data = json.dumps(row).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_args: Any) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HfApi]:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    Hub.files, Hub.keys, Hub.allowed, Hub.private = {}, set(), True, True
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield HfApi(endpoint=f"http://127.0.0.1:{server.server_port}", token="hf_key")
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a run with one version in full; what a store is, is tested elsewhere."""
    made = tmp_path / "run"
    folder = made / "weights" / "weight_v000004"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "manifest.json", "DONE"):
        (folder / name).write_text(f"{name} of version 4")
    (made / "config.json").write_text(json.dumps(CONFIG))
    (made / "summary.json").write_text(json.dumps(SUMMARY))
    version = WeightVersion(1, 4, "ab" * 16)
    monkeypatch.setattr("turnout.train.model_zoo.resolve_checkpoint", Path)

    def whole(store: Path, _files: Any, counter: int, *_rest: Any) -> tuple[WeightVersion, Path]:
        assert (store, counter) == (made / "weights", 4)
        return version, folder

    monkeypatch.setattr("turnout.weights.whole.whole_checkpoint", whole)
    return made


def test_a_version_goes_up_as_a_checkpoint_with_a_card(run: Path, hub: HfApi) -> None:
    url = push(run, "me/made", 4, private=True, api=hub)
    assert url.endswith("me/made") and set(Hub.files) == {
        "config.json", "model.safetensors", "tokenizer.json", "README.md"
    }, "without what is Turnout's own"  # fmt: skip
    assert Hub.files["model.safetensors"] == b"model.safetensors of version 4"
    assert Hub.keys == {"Bearer hf_key"} and b"0.5" in Hub.files["README.md"]


def test_what_is_private_goes_to_no_public_repository(run: Path, hub: HfApi) -> None:
    Hub.private = False
    with pytest.raises(ModelError, match="there already, and public"):
        push(run, "me/made", 4, private=True, api=hub)
    assert not Hub.files
    push(run, "me/made", 4, private=False, api=hub)


def test_a_card_says_what_the_run_says_and_nothing_of_the_machine() -> None:
    card = model_card(CONFIG, SUMMARY, "v000004-abababababababab")
    head, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", card, re.DOTALL).groups()  # type: ignore[union-attr]
    assert "library_name: transformers" in head and "base_model" not in head, "tiny models are of no hub"
    for said in (
        "4 train steps",
        "| 0.05 |",
        "v000004-abababababababab",
        "`mine.py:good`",
        "`rows.jsonl`",
        "async",
    ):
        assert said in body
    assert "/home" not in card and "secret" not in card and "KEY" not in card and "evaluation" not in body
    of_hub = {**CONFIG, "hf_checkpoint": "org/name"}
    assert "base_model: org/name" in model_card(of_hub, SUMMARY, "v")
    assert "base_model" not in model_card(of_hub, SUMMARY, "v", local=True)
    assert "base_model" not in model_card({**CONFIG, "hf_checkpoint": "my/own/folder"}, SUMMARY, "v")


def test_what_the_hub_or_the_run_refuses_is_told(run: Path, hub: HfApi, tmp_path: Path) -> None:
    Hub.allowed = False
    with pytest.raises(ModelError, match=r"does not take it: .*403.*hf auth login"):
        push(run, "me/made", 4, private=False, api=hub)
    with pytest.raises(DataError, match="write OWNER/NAME"):
        push(run, "made", 4, private=False, api=hub)
    with pytest.raises(DataError, match="the directory of a run that has ended"):
        push(tmp_path, "me/made", 4, private=False, api=hub)
    (run / "config.json").write_text(json.dumps({**CONFIG, "update_weight_disk_dir": "s3://bucket/x"}))
    with pytest.raises(DataError, match="versions lie in s3"):
        push(run, "me/made", None, private=False, api=hub)


def test_a_dry_run_asks_nobody(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "push", str(run), "me/made", "--version", "4", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "to me/made: v000004-abababababababab" in out and "model.safetensors  30 bytes" in out
