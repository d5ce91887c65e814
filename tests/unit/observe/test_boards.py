"""Weights & Biases as a fake module of the calls that are made, recorded from wandb 0.31.0."""

from __future__ import annotations

import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from turnout.core.errors import ConfigError
from turnout.observe import event_file
from turnout.observe.boards import Guarded, TensorBoard, WandbBoard, WandbPlan
from turnout.observe.metrics import MetricsLog

INIT = {
    "project",
    "entity",
    "group",
    "name",
    "id",
    "resume",
    "dir",
    "mode",
    "config",
    "settings",
}


class Fake(types.ModuleType):
    """`refuses`: the modes in which a run can't begin. Keyword arguments are those of the package."""

    def __init__(self, refuses: tuple[str | None, ...] = (), breaks_at: int | None = None) -> None:
        super().__init__("wandb")
        self.errors = types.SimpleNamespace(Error=type("Error", (Exception,), {}))
        self.begun: list[dict[str, Any]] = []
        self.logged: list[dict[str, float]] = []
        self.axes: list[tuple[str, str]] = []
        self.finished, self.torn = 0, False
        self._refuses, self._breaks_at = refuses, breaks_at

    def Settings(self, *, console: str, init_timeout: float) -> str:
        return f"{console} {init_timeout:g}"

    def teardown(self) -> None:
        self.torn = True

    def init(self, **given: Any) -> Fake:
        assert given.keys() == INIT
        if given["mode"] in self._refuses:
            raise self.errors.Error("no API key")
        self.begun.append(given)
        return self

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def log(self, data: dict[str, float]) -> None:
        if len(self.logged) == self._breaks_at:
            raise BrokenPipeError("the service is gone")  # none of the package's errors
        self.logged.append(data)

    def finish(self) -> None:
        self.finished += 1


def plan(folder: Path, **more: Any) -> WandbPlan:
    return WandbPlan("the-id", "quick", folder / "wandb", project="p", entity="t", group="g", **more)


def test_rows_go_there_under_slimes_names_with_their_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    board = WandbBoard(plan(tmp_path, mode="offline", config={"seed": 3}))
    with MetricsLog(tmp_path / "m.jsonl", [board]) as log:
        log.write(2, {"a": 0.5, "b": float("nan")})
        log.write(1, {"eval/score": 1.0})
    assert fake.logged == [{"a": 0.5, "step": 2}, {"eval/score": 1.0, "step": 1}]
    assert (fake.axes, fake.finished) == ([("*", "step")], 1)
    (begun,) = fake.begun
    assert begun.pop("dir") == str(tmp_path / "wandb") and (tmp_path / "wandb").is_dir()
    assert begun.pop("settings") == "off 30"
    names = {"project": "p", "entity": "t", "group": "g", "name": "quick", "id": "the-id"}
    assert begun == {**names, "mode": "offline", "resume": "allow", "config": {"seed": 3}}


def test_without_a_connection_the_run_is_kept_offline_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = Fake(refuses=(None,))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with caplog.at_level(logging.WARNING):
        WandbBoard(plan(tmp_path))
    assert [begun["mode"] for begun in fake.begun] == ["offline"] and fake.torn
    assert "no API key" in caplog.text and "wandb sync" in caplog.text


def test_what_was_asked_for_by_name_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Fake(refuses=("online",)))
    with pytest.raises(ConfigError, match="--wandb-mode = online: W&B says: no API key"):
        WandbBoard(plan(tmp_path, mode="online"))


def test_a_board_that_fails_is_left_out_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = Fake(breaks_at=1)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    board = Guarded(WandbBoard(plan(tmp_path)), "W&B")
    with caplog.at_level(logging.WARNING):
        for step in range(4):
            board.write(step, {"a": 1.0})
        board.close()
    assert len(fake.logged) == 1 and fake.finished == 1
    assert caplog.text.count("gets no more of this run") == 1


def test_tensorboard_on_a_full_disk_is_told_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_file.Path, "open", lambda _, mode: open("/dev/full", mode))  # noqa: SIM115, PTH123
    board = Guarded(TensorBoard(tmp_path, None), "TensorBoard")
    with caplog.at_level(logging.WARNING):
        for step in range(30):
            board.write(step, {"a": 1.0})
        board.close()
    assert [record.message for record in caplog.records] == [
        "TensorBoard gets no more of this run: [Errno 28] No space left on device"
    ]


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        WandbBoard(plan(tmp_path))
