"""A valid run's file in a folder with everything that it names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from turnout.config import load
from turnout.core.errors import ConfigError, Fault

VALID = """\
hf_checkpoint: model
prompt_data: train.jsonl
rm_type: exact
num_rollout: 10
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    arguments = (
        tmp_path / "env" / "lib" / "python3.11" / "site-packages" / "sglang" / "srt" / "server_args.py"
    )
    arguments.parent.mkdir(parents=True)  # an SGLang, as far as its list of arguments is concerned
    arguments.write_text("class ServerArgs:\n    mem_fraction_static: float = 0.9\n")
    for name in ("train", "held"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"input": "a", "label": "b"}) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write(folder: Path) -> Callable[[str], Path]:
    """Writes a valid file with more lines at its end."""

    def write(more: str = "", name: str = "quick.yaml") -> Path:
        path = folder / name
        path.write_text(VALID + more)
        return path

    return write


def faults_of(path: Path | None, argv: list[str]) -> list[Fault]:
    with pytest.raises(ConfigError) as caught:
        load(path, argv)
    return list(caught.value.faults)


def only(path: Path | None, argv: list[str]) -> Fault:
    faults = faults_of(path, argv)
    assert len(faults) == 1, [fault.line() for fault in faults]
    return faults[0]
