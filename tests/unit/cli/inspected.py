"""A run's directory that `turnout inspect` is asked about: its ledger and its events, and the asking."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.unit.rollout.ledger_parts import LABELS, file_ledger, fresh, part, prompt, whole
from tests.unit.rollout.parts import Log
from turnout.cli.main import main
from turnout.core.events import (
    EngineFenced,
    EngineLost,
    EngineReady,
    EngineWorked,
    GroupTrained,
    PhaseEnded,
    RunEnded,
    RunStarted,
    VersionAttested,
    VersionCommitted,
    VersionPrepared,
    VersionPublished,
    to_json,
)
from turnout.core.version import WeightVersion
from turnout.rollout.book import GroupBook
from turnout.rollout.ledger import Ledger
from turnout.rollout.ledger_rows import Piece


def inspected(folder: Path) -> Ledger:
    """Group 0 trains at step 0 in its second attempt, after it was cut and had tokens of two versions; 1 and 2 are
    dropped, 3 is cut."""
    ledger = file_ledger(folder)
    book = GroupBook(Log(), ledger)
    ledger.put_meta("run_id", "the-run")
    for counter, label in enumerate(LABELS, start=1):
        version = WeightVersion(0, counter, label.split("-")[1] + "0" * 16)
        assert version.label == label
        ledger.put_version(version, counter - 1, "committed")
    for ordinal in range(4):
        book.admit(fresh(ordinal), 0)
        book.start(fresh(ordinal).group_id)
    again = book.requeue("g00000000.0", prompt(0), 0, "stale: lag 3")
    book.start(again.group_id)
    book.cut(again.group_id)
    book.resume(again)
    group = whole(0, attempt=1)
    book.complete(group)
    for ordinal in (1, 2):
        book.drop(fresh(ordinal).group_id, "all rewards equal")
    ledger.journal(
        [Piece(fresh(3).group_id, 0, 0, part(30, 0, 2)), Piece(fresh(3).group_id, 0, 2, part(30, 2, 3))]
    )
    book.cut(fresh(3).group_id)
    book.take(0, [group])
    book.train([GroupTrained(group.group_id, 0, [], 0)])
    ledger.put_checkpoint(1, LABELS[1])
    return ledger


def write_events(folder: Path) -> None:
    """What the run told meanwhile: version 2 goes out as a delta; an engine is lost and comes again."""
    made = [
        (0.0, RunStarted("the-run", 0, 1, "async", 1, resumed_at=None)),
        (1.0, EngineReady("engine-0", "http://127.0.0.1:1", 11, "none")),
        (1.0, EngineReady("engine-1", "http://127.0.0.1:2", 12, "none")),
        (2.0, VersionAttested("engine-0", LABELS[0], "aa", "memory")),
        (4.0, EngineWorked("engine-0", 2.0, 5)),
        (5.0, VersionPublished(LABELS[1], 0, 2, "bb", 1, 4000, ["engine-0"], 1, "packed", 0.03)),
        (5.0, PhaseEnded("run", "publish", 0.5)),
        (5.5, VersionPrepared("engine-0", LABELS[1])),
        (5.5, PhaseEnded("update", "prepare", 0.5)),
        (5.75, VersionAttested("engine-0", LABELS[1], "bb", "memory")),
        (5.75, VersionCommitted(LABELS[1])),
        (5.75, PhaseEnded("update", "activate", 0.25)),
        (6.0, EngineFenced("engine-1", LABELS[1], "no answer")),
        (6.5, EngineLost("engine-1", "rollout", LABELS[0], "its process ended")),
        (8.0, EngineReady("engine-1", "http://127.0.0.1:3", 13, "none")),
        (9.0, RunEnded("finished", "", [])),
    ]
    lines = [json.dumps(to_json(event, 1_700_000_000 + at)) + "\n" for at, event in made]
    (folder / "events.jsonl").write_text("".join(lines))


def told(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["inspect", *map(str, words)]) == 0
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}", "TIME", capsys.readouterr().out)
