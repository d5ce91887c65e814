"""The update machine: every pair of phase and event, and random lives against a dumb model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from turnout.core.errors import IllegalTransition
from turnout.weights.update_machine import (
    TABLE,
    Abort,
    Activate,
    Attested,
    Begin,
    Commit,
    Failed,
    Fence,
    Phase,
    Publish,
    Published,
    UpdateState,
    step,
)

ENGINES = ("a", "b", "c")
ROOT, OTHER = "r" * 32, "o" * 32
EVENTS: dict[str, Any] = {
    "begin": Begin(ENGINES),
    "published": Published(ROOT),
    "attested": Attested("a", ROOT),
    "failed": Failed("a", "why"),
}


def run(*events: Any) -> UpdateState:
    state = UpdateState()
    for event in events:
        state, _ = step(state, event)
    return state


STATES = {
    Phase.IDLE: run(),
    Phase.PUBLISHING: run(Begin(ENGINES)),
    Phase.ACTIVATING: run(Begin(ENGINES), Published(ROOT)),
    Phase.COMMITTED: run(Begin(("a",)), Published(ROOT), Attested("a", ROOT)),
    Phase.ABORTED: run(Begin(ENGINES), Published(ROOT), Failed("b", "first")),
}
LEGAL = {
    ("idle", "begin"): ("publishing", (Publish(),)),
    ("publishing", "published"): ("activating", tuple(map(Activate, ENGINES))),
    ("publishing", "failed"): ("aborted", (Abort("why"),)),
    ("activating", "attested"): ("activating", ()),
    ("activating", "failed"): ("aborted", (Abort("why"), *map(Fence, ENGINES))),
    ("aborted", "attested"): ("aborted", ()),
    ("aborted", "failed"): ("aborted", ()),
}


def refused(state: UpdateState, event: Any) -> None:
    before = repr(state)
    with pytest.raises(IllegalTransition):
        step(state, event)
    assert repr(state) == before


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("name", EVENTS)
def test_every_pair(phase: Phase, name: str) -> None:
    state, event = STATES[phase], EVENTS[name]
    assert state.phase is phase
    assert TABLE.allows(phase, type(event)) == ((phase.value, name) in LEGAL)
    if (phase.value, name) not in LEGAL:
        refused(state, event)
        return
    after, effects = LEGAL[phase.value, name]
    got, done = step(state, event)
    assert (got.phase, done) == (after, effects)


def test_the_last_attestation_commits() -> None:
    state = STATES[Phase.ACTIVATING]
    for engine in ("c", "a"):
        state, effects = step(state, Attested(engine, ROOT))
        assert (state.phase, effects) == (Phase.ACTIVATING, ())
    state, effects = step(state, Attested("b", ROOT))
    assert (state.phase, effects) == (Phase.COMMITTED, (Commit(),))


def test_another_root_aborts_and_says_both() -> None:
    state, effects = step(STATES[Phase.ACTIVATING], Attested("b", OTHER))
    assert state.phase is Phase.ABORTED
    assert effects[1:] == tuple(map(Fence, ENGINES))
    assert ROOT in state.reason
    assert OTHER in state.reason
    assert "engine b" in state.reason


def test_the_first_cause_stays() -> None:
    state, _ = step(STATES[Phase.ABORTED], Failed("c", "second"))
    assert state.reason == "first"


def test_an_engine_that_attested_may_still_fail_before_the_commit() -> None:
    state = run(Begin(ENGINES), Published(ROOT), Attested("a", ROOT))
    state, effects = step(state, Failed("a", "died"))
    assert state.phase is Phase.ABORTED
    assert Fence("a") in effects


@pytest.mark.parametrize("required", [(), ("a", "a")])
def test_an_update_needs_engines_each_named_once(required: tuple[str, ...]) -> None:
    """Without one it would commit by itself; with one twice it could never."""
    refused(UpdateState(), Begin(required))


@pytest.mark.parametrize("event", [Attested("x", ROOT), Attested("x", OTHER), Failed("x", "why")])
def test_a_stranger_can_neither_commit_nor_abort(event: Any) -> None:
    refused(STATES[Phase.ACTIVATING], event)


@pytest.mark.parametrize("root", [ROOT, OTHER])
def test_an_engine_attests_once(root: str) -> None:
    refused(run(Begin(ENGINES), Published(ROOT), Attested("a", ROOT)), Attested("a", root))


class Update(RuleBasedStateMachine):
    """The model: sets of names and a flag. Committed iff all required attested the published root and nothing
    failed before; fenced are exactly those asked to activate in an update that was aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.state = UpdateState()
        self.required: frozenset[str] = frozenset()
        self.began = self.published = self.broken = self.committed = False
        self.good: set[str] = set()
        self.effects: list[Any] = []

    def feed(self, event: Any, legal: bool) -> None:
        if not legal:
            refused(self.state, event)
            return
        self.state, effects = step(self.state, event)
        self.effects += effects

    @rule(required=st.sets(st.sampled_from(ENGINES)))
    def begin(self, required: set[str]) -> None:
        legal = not self.began and bool(required)
        self.feed(Begin(tuple(sorted(required))), legal)
        if legal:
            self.began, self.required = True, frozenset(required)

    @rule()
    def publish(self) -> None:
        legal = self.began and not self.published and not self.broken
        self.feed(Published(ROOT), legal)
        self.published |= legal

    @precondition(lambda self: self.began)
    @rule(engine=st.sampled_from((*ENGINES, "stranger")), right=st.booleans())
    def attest(self, engine: str, right: bool) -> None:
        open_now = self.published and not self.broken and not self.committed
        legal = self.broken or (open_now and engine in self.required - self.good)
        self.feed(Attested(engine, ROOT if right else OTHER), legal)
        if legal and not self.broken:
            if right:
                self.good.add(engine)
                self.committed = self.good == self.required
            else:
                self.broken = True

    @rule(engine=st.sampled_from((*ENGINES, None)))
    def fail(self, engine: str | None) -> None:
        known = engine is None or engine in self.required
        legal = self.began and not self.committed and (self.broken or known)
        self.feed(Failed(engine, "why"), legal)
        self.broken |= legal

    @invariant()
    def committed_iff_all_attested_the_root(self) -> None:
        assert self.effects.count(Commit()) == self.committed == (self.state.phase is Phase.COMMITTED)

    @invariant()
    def fenced_are_those_asked_and_only_after_an_abort(self) -> None:
        aborts = [effect for effect in self.effects if isinstance(effect, Abort)]
        assert len(aborts) == self.broken == (self.state.phase is Phase.ABORTED)
        asked = [effect.engine for effect in self.effects if isinstance(effect, Activate)]
        fenced = [effect.engine for effect in self.effects if isinstance(effect, Fence)]
        assert sorted(asked) == (sorted(self.required) if self.published else [])
        assert sorted(fenced) == (sorted(asked) if self.broken else [])


Update.TestCase.settings = settings(max_examples=100, stateful_step_count=12, deadline=None)
TestUpdateAgainstTheModel = Update.TestCase
