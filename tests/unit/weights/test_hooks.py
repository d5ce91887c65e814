"""Hooks are found, called with the folder, and their faults told with the option's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnout.core.errors import ConfigError, WeightError
from turnout.weights.hooks import POST_WRITE_FLAG, load_hook

TEXT = """
def note(folder):
    (folder / "noted").touch()

def fails(folder):
    raise RuntimeError("the service is away")

thing = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_hook.py"
    path.write_text(TEXT)
    return path


def test_a_function_of_a_file_or_a_module(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for text in (f"{file}:note", "my_hook:note", "my_hook.note"):
        load_hook(POST_WRITE_FLAG, text)(tmp_path)
        (tmp_path / "noted").unlink()


def test_what_a_hook_raises_is_told(file: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=f"{POST_WRITE_FLAG} .*the service is away"):
        load_hook(POST_WRITE_FLAG, f"{file}:fails")(tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [("my_hook.py:none", "has no function 'none'"), ("my_hook.py:thing", "has no function"),
     ("away.py:note", "cannot be imported"), ("no.such.module:note", "cannot be imported"),
     ("broken.py:note", "cannot be imported")],
)  # fmt: skip
def test_what_is_no_hook_is_refused(file: Path, name: str, says: str) -> None:
    (file.parent / "broken.py").write_text("def note(:")
    text = str(file.parent / name) if ".py" in name else name
    with pytest.raises(ConfigError, match=says):
        load_hook(POST_WRITE_FLAG, text)
