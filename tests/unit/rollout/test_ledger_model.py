"""Group machine, book and ledger together against a model that is a few dicts: whatever is asked in whatever order,
and wherever the process dies, the file holds what the model holds, and the events tell it."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.unit.rollout.ledger_parts import as_killed, file_ledger, fresh, part, prompt, whole
from tests.unit.rollout.parts import Log
from turnout.core.errors import IllegalTransition, InvariantBroken
from turnout.core.events import GroupCompleted, GroupDropped, GroupRequeued, GroupTaken, GroupTrained
from turnout.core.types import RolloutGroup
from turnout.rollout.book import GroupBook
from turnout.rollout.ledger_check import problems
from turnout.rollout.ledger_rows import Piece

ROWS = {
    "start": {"waiting": "inflight"},
    "cut": {"inflight": "partial"},
    "resume": {"partial": "inflight"},
    "complete": {"inflight": "completed"},
    "return": {"taken": "completed"},
}
OPEN = ("waiting", "inflight", "partial", "completed", "taken")
FAST = "/dev/shm"  # syncs cost nothing there
WHICH = st.integers(0, 4)


class Failing(Exception):
    pass


class Model:
    """`groups`: ordinal -> [attempt, state, tokens of member 0 (None: all of the whole group), step that trained
    it, events in order]; ended attempts move to `ended`."""

    def __init__(self) -> None:
        self.groups: dict[int, list[Any]] = {}
        self.ended: dict[str, list[Any]] = {}
        self.batches: dict[int, list[str]] = {}


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=FAST if Path(FAST).is_dir() else None)
        self.lives = 0
        self.model = Model()
        self.log = Log()
        self.step = 0
        self.place = Path(self.folder.name) / "life0"
        self.place.mkdir()
        self._open()

    def _open(self) -> None:
        self.ledger = file_ledger(self.place)
        self.book = GroupBook(self.log, self.ledger)

    def teardown(self) -> None:
        self.ledger.close()
        self.folder.cleanup()

    def name(self, ordinal: int) -> str:
        return fresh(ordinal, self.model.groups[ordinal][0]).group_id

    def whole(self, ordinal: int) -> RolloutGroup:
        return whole(ordinal, attempt=self.model.groups[ordinal][0])

    @rule()
    def admit(self) -> None:
        ordinal = len(self.model.groups)
        self.book.admit(fresh(ordinal), self.step)
        self.model.groups[ordinal] = [0, "waiting", 0, None, ["admit"]]

    @precondition(lambda self: self.model.groups)
    @rule(which=WHICH, event=st.sampled_from(sorted(ROWS)))
    def move(self, which: int, event: str) -> None:
        ordinal = which % len(self.model.groups)
        calls = {
            "start": lambda: self.book.start(self.name(ordinal)),
            "cut": lambda: self.book.cut(self.name(ordinal)),
            "resume": lambda: self.book.resume(self.whole(ordinal)),
            "complete": lambda: self.book.complete(self.whole(ordinal)),
            "return": lambda: self.book.give_back(self.name(ordinal)),
        }
        group = self.model.groups[ordinal]
        after = ROWS[event].get(group[1])
        try:
            calls[event]()
        except IllegalTransition:
            assert after is None
            return
        assert after is not None, f"{event} of a {group[1]} group"
        group[1] = after
        group[4].append(event)
        if event == "complete":
            group[2] = None

    @precondition(lambda self: self.model.groups)
    @rule(which=WHICH, tokens=st.integers(1, 4))
    def journal(self, which: int, tokens: int) -> None:
        ordinal = which % len(self.model.groups)
        group = self.model.groups[ordinal]
        start = group[2] or 0
        piece = Piece(self.name(ordinal), 0, start, part(10 * ordinal, start, tokens))
        with contextlib.suppress(InvariantBroken):
            self.ledger.journal([piece])
            assert group[1] == "inflight"
            group[2] = start + tokens
            return
        assert group[1] != "inflight"

    @precondition(lambda self: all(group[1] != "taken" for group in self.model.groups.values()))
    @rule(size=st.integers(1, 3))
    def take(self, size: int) -> None:
        ready = [n for n, group in self.model.groups.items() if group[1] == "completed"][:size]
        self.book.take(self.step, [self.whole(n) for n in ready])
        self.model.batches[self.step] = [self.name(n) for n in ready]
        for n in ready:
            self.model.groups[n][1] = "taken"
            self.model.groups[n][4].append("take")

    @rule()
    def train(self) -> None:
        with self.book.transaction():
            for n, group in self.model.groups.items():
                if group[1] == "taken":
                    self.book.train([GroupTrained(self.whole(n).group_id, self.step, [], 0)])
        for group in self.model.groups.values():
            if group[1] == "taken":
                group[1], group[3] = "trained", self.step
                group[4].append("train")
        self.step += 1

    @precondition(lambda self: self.model.groups)
    @rule(which=WHICH, requeue=st.booleans())
    def end(self, which: int, requeue: bool) -> None:
        ordinal = which % len(self.model.groups)
        group = self.model.groups[ordinal]
        name = self.name(ordinal)
        allowed = group[1] in OPEN
        try:
            if requeue:
                self.book.requeue(name, prompt(ordinal), self.step, "again")
            else:
                self.book.drop(name, "why")
        except IllegalTransition:
            assert not allowed
            return
        assert allowed
        group[1], group[2] = "requeued" if requeue else "dropped", 0
        group[4].append("requeue" if requeue else "drop")
        if requeue:
            self.model.ended[name] = group
            self.model.groups[ordinal] = [group[0] + 1, "waiting", 0, None, ["admit"]]

    @precondition(lambda self: self.model.groups)
    @rule(then=st.sampled_from(["raise", "die"]))
    def fail_in_a_transaction(self, then: str) -> None:
        """Half of what a transaction does, and then an error, or the end of the process."""
        told = len(self.log.events)
        with contextlib.suppress(Failing), self.book.transaction():
            self.book.admit(fresh(len(self.model.groups)), 0)
            for n, group in self.model.groups.items():
                if group[1] in OPEN:
                    self.book.drop(self.name(n), "half done")
            if then == "die":
                self._die()
            raise Failing
        assert len(self.log.events) == told

    @rule()
    def die(self) -> None:
        self._die()

    def _die(self) -> None:
        self.lives += 1
        old, self.place = self.ledger, Path(self.folder.name) / f"life{self.lives}"
        as_killed(Path(self.folder.name) / f"life{self.lives - 1}", self.place)
        if not old._depth:
            old.close()
        self._open()
        assert self.ledger.incarnation == self.lives

    @rule(back=st.integers(0, 3))
    def resume(self, back: int) -> None:
        """Dies, and goes on from a checkpoint some steps ago."""
        self._die()
        step = max(0, self.step - back)
        told = len(self.log.events)
        self.book.roll_back(step)
        assert len(self.log.events) == told
        for group in self.model.groups.values():
            if group[1] == "trained" and group[3] >= step:
                group[1], group[3] = "completed", None
                group[4].append("restore")
            elif group[1] == "taken":
                group[1] = "completed"
                group[4].append("return")
            elif group[1] == "inflight":
                group[1] = "partial"
                group[4].append("cut")
        self.step = step

    @invariant()
    def file_and_model_agree(self) -> None:
        for ordinal, group in self.model.groups.items():
            row = self.ledger.row(self.name(ordinal))
            assert (row.attempt, row.state.value, row.trained) == (group[0], group[1], group[3])
            assert [move.event for move in self.ledger.history(row.group_id)] == group[4]
            members = self.ledger.members(row.group_id)
            if group[2] is None:
                assert tuple(members.values()) == self.whole(ordinal).trajectories
            else:
                assert members == ({0: part(10 * ordinal, 0, group[2])} if group[2] else {})
        for name, group in self.model.ended.items():
            assert [move.event for move in self.ledger.history(name)] == group[4]
        states = [g[1] for g in (*self.model.groups.values(), *self.model.ended.values())]
        assert {s.value: n for s, n in self.ledger.counts.items() if n} == {
            s: states.count(s) for s in states
        }
        assert self.ledger.counts == self.ledger.count_states()
        assert self.book.counts()["lost"] == 0
        assert list(problems(self.ledger)) == []
        for step, names in self.model.batches.items():
            batch = self.ledger.batch(step)
            assert batch is not None and list(batch.group_ids) == names

    @invariant()
    def events_tell_what_is_written(self) -> None:
        groups = (*self.model.groups.values(), *self.model.ended.values())
        moves = [event for group in groups for event in group[4]]
        for kind, event in (
            (GroupTaken, "admit"),
            (GroupCompleted, "complete"),
            (GroupTrained, "train"),
            (GroupDropped, "drop"),
            (GroupRequeued, "requeue"),
        ):
            assert len(self.log.of(kind)) == moves.count(event), kind


LedgerMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestLedger = LedgerMachine.TestCase
