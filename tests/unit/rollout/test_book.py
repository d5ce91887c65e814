"""The book: every prompt taken has one history and one end."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.unit.rollout.parts import Log, memory_ledger
from turnout.core.errors import IllegalTransition, InvariantBroken
from turnout.core.events import GroupCompleted, GroupDropped, GroupTaken, GroupTrained
from turnout.core.types import Finish, Prompt, RolloutGroup, Trajectory
from turnout.core.version import Runs, VersionSpans
from turnout.rollout.book import GroupBook, samples_digest, versions_of


def group(name: str = "g0", *runs: tuple[tuple[int, str], ...]) -> RolloutGroup:
    members = tuple(
        Trajectory(
            (1,) * n,
            (-0.5,) * n,
            (1,) * n,
            VersionSpans(run),
            Finish.STOP,
            "",
            Runs().extended(n, "e"),
            0,
            float(at),
        )
        for at, run in enumerate(runs)
        for n in [sum(tokens for tokens, _ in run)]
    )
    return RolloutGroup(name, 0, 0, Prompt(f"p-{name}", (1,), ""), members)


STEPS: list[tuple[str, Any]] = [
    ("start", lambda book, g: book.start(g.group_id)),
    ("complete", lambda book, g: book.complete(g)),
    ("take", lambda book, g: book.take(3, [g])),
    ("train", lambda book, g: book.train([GroupTrained(g.group_id, 3, ["v1", "v2"], 0)])),
]


def test_the_whole_life_of_a_group_is_told() -> None:
    log = Log()
    book, one = GroupBook(log, memory_ledger()), group("g0", ((2, "v1"), (1, "v2")), ((1, "v2"),))
    book.admit(one, 3)
    for _, step in STEPS:
        step(book, one)
    assert log.of(GroupTaken) == [GroupTaken("g0", "p-g0", 3)]
    (completed,) = log.of(GroupCompleted)
    assert (completed.group, completed.lengths) == ("g0", [[3, 3, 3, 3], [1, 1, 1, 1]])
    assert (completed.versions, completed.rewards) == (["v1", "v2"], [0.0, 1.0])
    (trained,) = log.of(GroupTrained)
    assert (trained.group, trained.step, trained.versions, trained.lag) == ("g0", 3, ["v1", "v2"], 0)
    assert book.counts() == {"taken": 1, "trained": 1, "dropped": 0, "requeued": 0, "lost": 0}
    assert book.open_groups == {}


@pytest.mark.parametrize("done", range(len(STEPS)))
@pytest.mark.parametrize("then", range(len(STEPS)))
def test_steps_out_of_order_raise_and_change_nothing(done: int, then: int) -> None:
    log = Log()
    book, one = GroupBook(log, memory_ledger()), group()
    book.admit(one, 0)
    for _, step in STEPS[:done]:
        step(book, one)
    if done == then:
        return
    state, told = dict(book.open_groups), len(log.events)
    with pytest.raises(IllegalTransition):
        STEPS[then][1](book, one)
    assert (book.open_groups, len(log.events)) == (state, told)
    assert book.counts() == {"taken": 1, "trained": 0, "dropped": 0, "requeued": 0, "lost": 0}


@pytest.mark.parametrize("step", [step for _, step in STEPS])
def test_a_group_that_was_never_admitted_or_has_ended_gets_nothing(step: Any) -> None:
    log = Log()
    book = GroupBook(log, memory_ledger())
    with pytest.raises(InvariantBroken, match="g0 is not in the ledger"):
        step(book, group())
    book.admit(group(), 0)
    book.drop("g0", "why")
    with pytest.raises(IllegalTransition):
        step(book, group())
    with pytest.raises(IllegalTransition):
        book.drop("g0", "again")
    assert log.of(GroupDropped) == [GroupDropped("g0", "why")]


def test_a_group_is_taken_once() -> None:
    book = GroupBook(Log(), memory_ledger())
    book.admit(group(), 0)
    with pytest.raises(InvariantBroken, match="taken twice"):
        book.admit(group(), 1)
    assert book.counts()["taken"] == 1


def test_versions_of_a_group_are_those_of_all_its_tokens() -> None:
    assert versions_of(group("g", ((1, "b"), (1, "a")), ((2, "c"),), ())) == ["a", "b", "c"]
    assert versions_of(group("g")) == []


def test_the_digest_of_the_samples_is_over_tokens_and_exact_log_probs() -> None:
    one = group("g", ((2, "a"),), ((1, "a"),)).trajectories
    other = replace(one[0], logprobs=(-0.5, math.nextafter(-0.5, 0)))
    assert samples_digest(one) == samples_digest(list(one))
    assert samples_digest(one) != samples_digest(one[::-1])
    assert samples_digest(one) != samples_digest((other, one[1]))
    assert len(samples_digest(one)) == 16


class Conservation(RuleBasedStateMachine):
    """Whatever is asked in whatever order: taken = trained + dropped + open, by the book and by the log."""

    def __init__(self) -> None:
        super().__init__()
        self.log = Log()
        self.book = GroupBook(self.log, memory_ledger())
        self.taken = 0

    @rule()
    def take(self) -> None:
        self.book.admit(group(f"g{self.taken}"), 0)
        self.taken += 1

    @rule(which=st.integers(0, 3), step=st.sampled_from([step for _, step in STEPS]))
    def advance(self, which: int, step: Any) -> None:
        self.tried(lambda name: step(self.book, group(name)), which)

    @rule(which=st.integers(0, 3), reason=st.sampled_from("xy"))
    def drop(self, which: int, reason: str) -> None:
        self.tried(lambda name: self.book.drop(name, reason), which)

    def tried(self, step: Any, which: int) -> None:
        with contextlib.suppress(IllegalTransition, InvariantBroken):
            step(f"g{which}")

    @invariant()
    def conserved(self) -> None:
        counts, opened = self.book.counts(), set(self.book.open_groups)
        ended = [e.group for e in self.log.events if isinstance(e, GroupTrained | GroupDropped)]
        assert len(ended) == len(set(ended)) == counts["trained"] + counts["dropped"]
        assert opened.isdisjoint(ended)
        assert {e.group for e in self.log.of(GroupTaken)} == opened | set(ended)
        assert (counts["lost"], counts["taken"]) == (0, self.taken)
        assert sum(self.book.dropped.values()) == counts["dropped"]


Conservation.TestCase.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
TestConservation = Conservation.TestCase
