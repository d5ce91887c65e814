"""A real writer of the ledger, killed with SIGKILL at instants that nobody chose: what it had said is there."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.ledger_child import MEMBERS, PIECE, TOKENS
from tests.unit.rollout.ledger_parts import part, whole
from turnout.core.events import GroupCompleted, GroupTaken, GroupTrained
from turnout.observe.eventlog import read_events
from turnout.rollout.ledger_check import problems
from turnout.rollout.ledger_read import LedgerReader

KILLS = 4
JOURNAL = "journal"


def killed_run(folder: Path, lines: int) -> list[list[str]]:
    """What a writer said until it was killed, after so many lines or a few more."""
    command = [sys.executable, "-m", "tests.ledger_child", str(folder)]
    said: list[list[str]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        for line in child.stdout:
            said.append(line.decode().split())
            if len(said) == lines:
                child.kill()  # the rest of what is in the pipe was said as well
    assert child.returncode == -9
    return [words for words in said if len(words) == 2]


def test_what_a_killed_writer_had_said_is_in_the_ledger(tmp_path: Path) -> None:
    source = random.Random(5)
    said: list[list[str]] = []
    for life in range(KILLS):
        said += killed_run(tmp_path, source.randrange(40, 160))
        assert ["opened", str(life)] in said
        ledger = LedgerReader.of(tmp_path / "ledger.sqlite")
        check(ledger, said)
        ledger.close()
    told = Counter(type(event) for _, event in read_events(tmp_path / "events.jsonl"))
    events = Counter(event for event, _ in said)
    for kind, event in ((GroupTaken, "admit"), (GroupCompleted, "complete"), (GroupTrained, "train")):
        assert told[kind] >= events[event], "said, written, told"


def check(ledger: LedgerReader, said: list[list[str]]) -> None:
    journalled = {name: int(e.removeprefix(JOURNAL)) for e, name in said if e.startswith(JOURNAL)}
    for name in {name for event, name in said if event != "opened"}:
        moves = [move.event for move in ledger.history(name)]
        for event in [event for event, of in said if of == name and not event.startswith(JOURNAL)]:
            assert event in moves, f"{name}: {event} was said"
        ordinal, members = int(name[1:9]), ledger.members(name)
        if "complete" in moves:
            assert tuple(members.values()) == whole(ordinal, MEMBERS, TOKENS).trajectories
        elif name in journalled:
            tokens = len(members[0].response_ids)
            assert tokens in (journalled[name], journalled[name] + PIECE)
            assert list(members.values()) == [part(10 * ordinal + m, 0, tokens) for m in range(MEMBERS)]
    assert list(problems(ledger)) == []
