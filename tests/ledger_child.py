"""A writer of a ledger that says what it has done, until it is killed: `python -m tests.ledger_child FOLDER`.

Each line on stdout is `event group` of a call that has returned. It goes on from whatever an earlier one left.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.unit.rollout.ledger_parts import fresh, part, whole
from turnout.core.events import GroupTrained
from turnout.observe.eventlog import EventLog
from turnout.placement.real import RealClock
from turnout.rollout.book import GroupBook
from turnout.rollout.group_machine import GroupState
from turnout.rollout.ledger import Ledger
from turnout.rollout.ledger_owner import Claim
from turnout.rollout.ledger_rows import Piece
from turnout.rollout.ledger_schema import open_database

MEMBERS, TOKENS, PIECE, BATCH = 4, 60, 20, 4


def say(event: str, name: str) -> None:
    print(event, name, flush=True)


def grow(ledger: Ledger, book: GroupBook, ordinal: int) -> None:
    """Journals the members of a group piece by piece, then completes it."""
    name, goal = fresh(ordinal).group_id, whole(ordinal, MEMBERS, TOKENS)
    have = ledger.members(name)
    start = min((len(t.response_ids) for t in have.values()), default=0)
    while start < TOKENS:
        parts = (part(10 * ordinal + m, start, PIECE) for m in range(MEMBERS))
        ledger.journal([Piece(name, m, start, made) for m, made in enumerate(parts)])
        start += PIECE
        say(f"journal{start}", name)
    book.complete(goal)
    say("complete", name)


def main(folder: Path) -> None:
    clock = RealClock()
    ledger = Ledger(open_database(folder / "ledger.sqlite"), Claim.of_this_process(clock))
    with EventLog(folder / "events.jsonl", clock) as events:
        book, step = GroupBook(events, ledger), ledger.incarnation * 1_000_000
        book.roll_back(step)
        say("opened", str(ledger.incarnation))
        left = {row.ordinal: row.state for row in ledger.open_rows()}
        while True:
            for ordinal, state in sorted(left.items()):
                if state is GroupState.PARTIAL:
                    book.resume(fresh(ordinal))
                elif state is GroupState.WAITING:
                    book.start(fresh(ordinal).group_id)
                if state is not GroupState.COMPLETED:
                    grow(ledger, book, ordinal)
            groups = [whole(ordinal, MEMBERS, TOKENS) for ordinal in sorted(left)]
            book.take(step, groups)
            for group in groups:
                say("take", group.group_id)
            book.train([GroupTrained(group.group_id, step, [], 0) for group in groups])
            for group in groups:
                say("train", group.group_id)
            step += 1
            first = ledger.next_ordinal()
            left = dict.fromkeys(range(first, first + BATCH), GroupState.WAITING)
            for ordinal in left:
                book.admit(fresh(ordinal), step)
                say("admit", fresh(ordinal).group_id)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
