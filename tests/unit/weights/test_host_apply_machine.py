"""The table of a local checkpoint: every (state, event) pair, the order of effects, and random events."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from turnout.core.errors import IllegalTransition
from turnout.weights.host_apply_machine import (
    TABLE,
    Adopted,
    Anchor,
    Delta,
    Effect,
    Failed,
    Fetched,
    HostState,
    Logged,
    Opened,
    Overwritten,
    Phase,
    Switched,
    step,
)

A, B, C = "a" * 32, "b" * 32, "c" * 32
EVENTS: tuple[Any, ...] = (
    Opened(A), Delta(A, B), Logged(), Overwritten(), Anchor(B), Fetched(), Switched(), Adopted(A), Failed(),
)  # fmt: skip
STATES = {
    Phase.UNOPENED: HostState(),
    Phase.UNKNOWN: HostState(Phase.UNKNOWN),
    Phase.SETTLED: HostState(Phase.SETTLED, A),
    Phase.JOURNALING: HostState(Phase.JOURNALING, A, B),
    Phase.OVERWRITING: HostState(Phase.OVERWRITING, None, B),
    Phase.FETCHING: HostState(Phase.FETCHING, A, B),
    Phase.SWITCHING: HostState(Phase.SWITCHING, None, B),
}


@pytest.mark.parametrize(("phase", "event"), list(product(Phase, EVENTS)))
def test_every_pair(phase: Phase, event: Any) -> None:
    state = STATES[phase]
    if not TABLE.allows(phase, type(event)):
        with pytest.raises(IllegalTransition):
            step(state, event)
        return
    after, _ = step(state, event)
    assert (after.held is not None) == (after.phase in (Phase.SETTLED, Phase.JOURNALING)) or (
        after.phase is Phase.FETCHING
    )


@pytest.mark.parametrize(
    ("found", "phase", "held", "effects"),
    [
        (Opened(None), Phase.UNKNOWN, None, [Effect.DROP_LOG]),
        (Opened(A), Phase.SETTLED, A, [Effect.DROP_LOG]),
        (Opened(A, log=(A, B)), Phase.OVERWRITING, None, [Effect.OVERWRITE]),
        (Opened(B, log=(A, B)), Phase.SETTLED, B, [Effect.DROP_LOG]),  # it was applied; only the log stayed
        (Opened(C, log=(A, B)), Phase.SETTLED, C, [Effect.DROP_LOG]),
        (Opened(B, switching=True), Phase.SWITCHING, None, [Effect.DROP_LOG, Effect.MOVE_FILES]),
        (Opened(A, switching=True, log=(A, B)), Phase.SWITCHING, None, [Effect.DROP_LOG, Effect.MOVE_FILES]),
    ],
)
def test_what_is_found_decides_what_is_done(found: Opened, phase: Phase, held: Any, effects: Any) -> None:
    state, done = step(HostState(), found)
    assert (state.phase, state.held, list(done)) == (phase, held, effects)


def test_what_is_promised_is_persisted_first() -> None:
    assert step(STATES[Phase.SETTLED], Delta(A, B))[1] == (Effect.WRITE_LOG,)
    assert step(STATES[Phase.JOURNALING], Logged())[1] == (Effect.OVERWRITE,)
    assert step(STATES[Phase.OVERWRITING], Overwritten())[1] == (Effect.SETTLE, Effect.DROP_LOG)
    assert step(STATES[Phase.FETCHING], Fetched())[1] == (Effect.ANNOUNCE, Effect.DROP_LOG, Effect.MOVE_FILES)


def test_wgt_04_a_delta_on_another_base_is_illegal() -> None:
    with pytest.raises(IllegalTransition):
        step(STATES[Phase.SETTLED], Delta(B, C))


def test_a_fetch_that_fails_leaves_what_was_held() -> None:
    assert step(STATES[Phase.FETCHING], Failed())[0] == HostState(Phase.SETTLED, A)
    assert step(HostState(Phase.FETCHING, None, B), Failed())[0] == HostState(Phase.UNKNOWN)


class Host(RuleBasedStateMachine):
    """Against a model of the disk: effects are performed on it in order; `opened` after any of them converges."""

    def __init__(self) -> None:
        super().__init__()
        self.state, _ = step(HostState(), Opened(A))
        self.files, self.named, self.switching = A, A, False  # what the weights are, what the state file says
        self.log: tuple[str, str] | None = None
        self.beside = ""

    def perform(self, effects: tuple[Effect, ...], cut: int) -> bool:
        """The first `cut` of the effects; True where all were done."""
        for effect in effects[:cut]:
            if effect is Effect.WRITE_LOG:
                self.log = (self.files, self.state.target)
            elif effect is Effect.OVERWRITE:
                assert self.log is not None
                self.files = self.log[1]
            elif effect is Effect.SETTLE:
                self.named, self.switching = self.state.held or "", False
            elif effect is Effect.DROP_LOG:
                self.log = None
            elif effect is Effect.FETCH:
                self.beside = self.state.target
            elif effect is Effect.ANNOUNCE:
                self.named, self.switching = self.state.target, True
            elif effect is Effect.MOVE_FILES:
                self.files = self.beside
        return cut >= len(effects)

    @rule(
        event=st.sampled_from(["delta", "anchor"]),
        root=st.sampled_from([A, B, C]),
        cuts=st.lists(st.integers(0, 3)),
    )
    def take(self, event: str, root: str, cuts: list[int]) -> None:
        after: dict[Effect, Any] = {
            Effect.WRITE_LOG: Logged(), Effect.OVERWRITE: Overwritten(), Effect.FETCH: Fetched(),
            Effect.MOVE_FILES: Switched(),
        }  # fmt: skip
        begin: Any = Delta(self.files, root) if event == "delta" else Anchor(root)
        pending, cuts = [begin], [*cuts]
        while pending:
            self.state, effects = step(self.state, pending.pop(0))
            cut = cuts.pop(0) if cuts else len(effects)
            if not self.perform(effects, cut):  # killed; the restart is not
                found = Opened(self.named, self.switching, self.log)
                self.state, effects = step(HostState(), found)
                cuts = []
                self.perform(effects, len(effects))
            pending += [after[effect] for effect in effects if effect in after]

    @invariant()
    def the_files_are_what_is_said(self) -> None:
        assert self.state.phase is Phase.SETTLED
        assert self.files == self.state.held == self.named and not self.switching


TestHost = Host.TestCase
TestHost.settings = settings(max_examples=100, stateful_step_count=8, deadline=None)
