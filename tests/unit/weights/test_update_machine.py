"""The two tables of a weight update: every (state, event) pair, and random events against a dumb model."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from turnout.core.errors import IllegalTransition
from turnout.weights.engine_machine import ENGINE_TABLE, Engine, Fact
from turnout.weights.update_machine import (
    TABLE,
    Abort,
    Activate,
    Attested,
    Begin,
    Close,
    Commit,
    Failed,
    Fence,
    Go,
    Joined,
    Phase,
    Prepare,
    Prepared,
    Publish,
    Published,
    UpdateState,
    step,
)

ROOT, OTHER = "a" * 32, "b" * 32
ENGINES = ("x", "y")
PREPARED = (Prepared("x"), Prepared("y"))
EVENTS: tuple[Any, ...] = (
    Begin(ENGINES, 2), Published(ROOT), Prepared("x"), Go(), Go(("x",)), Attested("x", ROOT), Attested("x", OTHER),
    Failed("x", "why"), Failed(None, "why"), Joined("x"), Joined("z"),
)  # fmt: skip


def run(*events: Any) -> UpdateState:
    state = UpdateState()
    for event in events:
        state, _ = step(state, event)
    return state


def begun(at_least: int = 2) -> tuple[Any, ...]:
    return (Begin(ENGINES, at_least), Published(ROOT))


STATES = {
    Phase.IDLE: UpdateState(),
    Phase.PUBLISHING: run(Begin(ENGINES, 2)),
    Phase.PREPARING: run(*begun()),
    Phase.ACTIVATING: run(*begun(), *PREPARED, Go()),
    Phase.COMMITTED: run(*begun(), *PREPARED, Go(), Attested("x", ROOT), Attested("y", ROOT)),
    Phase.ABORTED: run(*begun(), Failed(None, "why")),
}


def refused(state: UpdateState, event: Any) -> None:
    with pytest.raises(IllegalTransition):
        step(state, event)


@pytest.mark.parametrize(("phase", "event"), list(product(Phase, EVENTS)), ids=str)
def test_every_pair_of_phase_and_event(phase: Phase, event: Any) -> None:
    """Legal where the table has a row, but for Go before all have prepared; an update that ended never changes."""
    state = STATES[phase]
    assert state.phase is phase
    early = phase is Phase.PREPARING and (isinstance(event, Attested) or event == Go())
    stranger = isinstance(event, Prepared | Attested) and phase is Phase.PUBLISHING
    if not TABLE.allows(phase, type(event)) or early or stranger:
        refused(state, event)
        return
    after, effects = step(state, event)
    if phase in (Phase.COMMITTED, Phase.ABORTED):
        assert after == state and effects == ()


LEGAL = {
    Engine.ABSENT: {Fact.FAILED, Fact.COMMITTED, Fact.ABORTED},
    Engine.BEHIND: {Fact.PREPARE, Fact.FOLLOW, Fact.FAILED, Fact.ABORTED},
    Engine.PREPARING: {Fact.PREPARED, Fact.FAILED, Fact.ABORTED},
    Engine.PREPARED: {Fact.PREPARED, Fact.ACTIVATE, Fact.FAILED, Fact.ABORTED},
    Engine.ACTIVATING: {Fact.PREPARED, Fact.ATTESTED, Fact.FAILED, Fact.ABORTED},
    Engine.FOLLOWING: {Fact.ATTESTED, Fact.FAILED, Fact.COMMITTED, Fact.ABORTED},
    Engine.TENTATIVE: {Fact.PREPARED, Fact.ATTESTED, Fact.FAILED, Fact.COMMITTED, Fact.ABORTED},
    Engine.SERVING: set(),
    Engine.FENCED: {Fact.PREPARED, Fact.ATTESTED, Fact.FAILED, Fact.COMMITTED, Fact.ABORTED},
}


@pytest.mark.parametrize(("state", "fact"), list(product(Engine, Fact)), ids=str)
def test_every_pair_of_engine_state_and_fact(state: Engine, fact: Fact) -> None:
    assert ENGINE_TABLE.allows(state, fact) == (fact in LEGAL[state])
    if fact not in LEGAL[state]:
        with pytest.raises(IllegalTransition):
            ENGINE_TABLE.after(state, fact)
        return
    after = ENGINE_TABLE.after(state, fact)
    if state is Engine.FENCED:
        assert after is Engine.FENCED  # no answer of this update lifts a fence
    if after is Engine.SERVING:
        assert (state, fact) == (Engine.TENTATIVE, Fact.COMMITTED)
    if fact is Fact.ABORTED:  # whoever was told to activate holds unknown or tentative weights
        touched = state in (Engine.ACTIVATING, Engine.TENTATIVE, Engine.FENCED)
        assert after is (
            Engine.FENCED if touched else Engine.ABSENT if state is Engine.ABSENT else Engine.BEHIND
        )


def test_effects_of_a_good_update() -> None:
    state, effects = step(UpdateState(), Begin(ENGINES, 2))
    assert effects == (Publish(),)
    state, effects = step(state, Published(ROOT))
    assert effects == (Prepare("x"), Prepare("y"))
    for event in PREPARED:
        state, effects = step(state, event)
        assert effects == ()
    state, effects = step(state, Go())
    assert effects == (Activate("x"), Activate("y"))
    state, effects = step(state, Attested("y", ROOT))
    assert (state.phase, effects) == (Phase.ACTIVATING, ())
    state, effects = step(state, Attested("x", ROOT))
    assert (state.phase, effects) == (Phase.COMMITTED, (Commit(ENGINES),))


HALVES = (frozenset({"p1", "p2"}), frozenset({"d1", "d2"}))


@pytest.mark.parametrize(
    "lost, phase",
    [(("p1", "d2"), Phase.PREPARING), (("p1", "p2"), Phase.ABORTED), (("d2", "d1"), Phase.ABORTED)],
)
def test_an_update_needs_one_engine_of_each_half_of_the_pairs(lost: tuple[str, ...], phase: Phase) -> None:
    engines = ("p1", "p2", "d1", "d2")
    state = run(Begin(engines, 1, HALVES), Published(ROOT), *(Failed(name, "gone") for name in lost))
    assert state.phase is phase
    if phase is Phase.ABORTED:
        names = ", ".join(sorted(lost))
        assert f"of {names} none is left" in state.reason
    assert run(Begin(("d1", "d2"), 1, HALVES)).phase is Phase.ABORTED, "no prefill engine takes part"


@pytest.mark.parametrize("required", [("x", "x"), ()])
def test_engines_are_named_once_and_there_is_one(required: tuple[str, ...]) -> None:
    """Without one it would commit by itself; with one twice it could never."""
    if required:
        refused(UpdateState(), Begin(required, 1))
    else:
        assert run(Begin(required, 1)).phase is Phase.ABORTED
    refused(UpdateState(), Begin(ENGINES, 0))


@pytest.mark.parametrize(
    "event", [Attested("q", ROOT), Attested("q", OTHER), Failed("q", "why"), Prepared("q")]
)
def test_a_stranger_can_neither_commit_nor_abort(event: Any) -> None:
    refused(STATES[Phase.ACTIVATING], event)


def test_a_run_without_engines_commits_what_it_publishes() -> None:
    state, done = UpdateState(), []
    for event in (Begin((), 0), Published(ROOT), Go()):
        state, effects = step(state, event)
        done += effects
    assert state.phase is Phase.COMMITTED and done[-1] == Commit(())
    refused(UpdateState(), Begin(("x",), 0))
    assert step(UpdateState(), Begin((), 1))[0].phase is Phase.ABORTED


def test_a_joiner_of_this_update_attests_nothing_of_it() -> None:
    joined, effects = step(STATES[Phase.ACTIVATING], Joined("z"))
    assert effects == () and joined.engines["z"] is Engine.ABSENT
    refused(joined, Attested("z", ROOT))


class Update(RuleBasedStateMachine):
    """The model: a set of names for each thing that happened, no states. Committed iff every engine that never
    failed attested the published root and they are enough, where they follow: iff enough of them did; fenced are
    those that failed, and after an abort those told to activate, or that did so by themselves."""

    names = ("x", "y", "z")

    def __init__(self) -> None:
        super().__init__()
        self.state = UpdateState()
        self.effects: list[Any] = []
        self.required: set[str] = set()
        self.at_least = 0
        self.prepared: set[str] = set()
        self.good: set[str] = set()
        self.bad: set[str] = set()
        self.told: set[str] = set()
        self.began = self.published = self.gone = self.committed = self.aborted = self.follow = False

    @property
    def live(self) -> set[str]:
        return self.required - self.bad

    def feed(self, event: Any, legal: bool) -> bool:
        if not legal:
            refused(self.state, event)
            return False
        self.state, effects = step(self.state, event)
        self.effects += effects
        return not (self.committed or self.aborted)

    def settle(self) -> None:
        if len(self.live) < self.at_least:
            self.aborted = True
        elif self.gone and len(self.good & self.live) >= (self.at_least if self.follow else len(self.live)):
            self.committed = True

    @rule(required=st.sets(st.sampled_from(names)), at_least=st.integers(0, 3), follow=st.booleans())
    def begin(self, required: set[str], at_least: int, follow: bool) -> None:
        event = Begin(tuple(sorted(required)), at_least, follow=follow)
        if self.feed(event, not self.began and at_least >= bool(required)):
            self.began, self.required, self.at_least, self.follow = True, required, at_least, follow
            self.settle()

    @rule()
    def publish(self) -> None:
        if self.feed(Published(ROOT), self.aborted or (self.began and not self.published)):
            self.published = True

    @rule(name=st.sampled_from((*names, "stranger")))
    def prepare(self, name: str) -> None:
        ended = self.committed or self.aborted
        asked = self.good | self.bad if self.follow else self.required
        legal = ended or (self.published and name in asked & self.required)
        if self.feed(Prepared(name), legal) and name in self.live and not self.follow:
            self.prepared.add(name)

    @rule(busy=st.booleans())
    def go(self, busy: bool) -> None:
        ready = self.published and not self.gone and not self.committed
        legal = self.aborted or (ready and (busy or self.follow or self.prepared >= self.live))
        if self.feed(Go(("x",) if busy else ()), legal):
            if busy:
                self.aborted = True
            else:
                self.gone, self.told = True, set() if self.follow else set(self.live)
                self.settle()

    @rule(name=st.sampled_from((*names, "stranger")), right=st.booleans())
    def attest(self, name: str, right: bool) -> None:
        ended = self.committed or self.aborted
        may = self.published if self.follow else self.gone
        legal = ended or (may and name in self.required)
        if self.feed(Attested(name, ROOT if right else OTHER), legal) and name in self.live:
            (self.good if right else self.bad).add(name)
            self.settle()

    @rule(name=st.sampled_from((*names, None)))
    def fail(self, name: str | None) -> None:
        ended = self.committed or self.aborted
        if self.feed(Failed(name, "why"), ended or (self.began and (name is None or name in self.required))):
            if name is None:
                self.aborted = True
            elif name in self.live:
                self.bad.add(name)
                self.settle()

    @invariant()
    def committed_iff_all_that_count_attested_the_root(self) -> None:
        commits = [effect for effect in self.effects if isinstance(effect, Commit)]
        assert len(commits) == self.committed == (self.state.phase is Phase.COMMITTED)
        for commit in commits:
            assert set(commit.engines) == self.live & self.good and len(commit.engines) >= self.at_least
            assert self.follow or self.live <= self.good

    @invariant()
    def fenced_are_those_that_failed_and_after_an_abort_those_told_to_activate(self) -> None:
        aborts = [effect for effect in self.effects if isinstance(effect, Abort)]
        assert len(aborts) == self.aborted == (self.state.phase is Phase.ABORTED)
        fenced = [effect.engine for effect in self.effects if isinstance(effect, Fence)]
        changed = self.good if self.follow else self.told
        assert sorted(fenced) == sorted(self.bad | (changed if self.aborted else set()))

    @invariant()
    def told_to_activate_are_those_prepared(self) -> None:
        told = {effect.engine for effect in self.effects if isinstance(effect, Activate)}
        assert told == self.told <= self.prepared
        closed = [effect.engine for effect in self.effects if isinstance(effect, Close)]
        assert sorted(closed) == (sorted(self.good) if self.follow else [])


Update.TestCase.settings = settings(max_examples=200, stateful_step_count=16, deadline=None)
TestUpdateAgainstTheModel = Update.TestCase
