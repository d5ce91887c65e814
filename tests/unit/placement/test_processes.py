"""Limits of the process that controls a run."""

from __future__ import annotations

import resource

import pytest

from turnout.placement import processes


@pytest.mark.parametrize(
    "before, after, said",
    [
        ((1024, 1 << 20), (65536, 1 << 20), False),
        ((1024, 2048), (2048, 2048), True),
        ((9000, 9000), None, False),
    ],
)
def test_the_limit_of_open_files_is_raised(
    before: tuple[int, int],
    after: tuple[int, int] | None,
    said: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _what: before)
    monkeypatch.setattr(resource, "setrlimit", lambda _what, limits: made.append(limits))
    processes.raise_file_limit()
    assert made == ([] if after is None else [after]) and bool(caplog.records) is said
