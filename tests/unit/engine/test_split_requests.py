"""Requests split over two engines, in the scheduler alone: HELD on the side that computes the prompt, PENDING and
RECEIVING on the side that decodes. Random schedules of both kinds among whole requests."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.engine.test_scheduler_machine import PAGE, FakeEngine, limits, prompt_of
from turnout.core.errors import IllegalTransition
from turnout.core.types import Finish
from turnout.engine.request_machine import Request, State
from turnout.engine.scheduler_machine import Limits
from turnout.protocol.sglang import SamplingParams

KINDS = ("whole", "hold", "remote")


class SplitEngine(FakeEngine):
    """A FakeEngine that also holds and receives."""

    def submit_kind(self, prompt: int, new: int, kind: str) -> None:
        if self.scheduler.full or not self.scheduler.fits(prompt + new):
            return
        row = {"hold": kind == "hold", "remote": kind == "remote"}
        request = Request(
            f"r{len(self.seen)}", prompt_of(0, prompt), SamplingParams(max_new_tokens=new), 0, **row
        )
        self.seen[request.rid] = request
        self.scheduler.submit(request)

    def step(self) -> bool:
        before = {r.rid for r in self.seen.values() if r.generated}
        worked = super().step()
        for request in list(self.scheduler.running):
            if request.hold and request.generated and request.rid not in before:
                self.scheduler.hold(request)
        self.scheduler.check()
        return worked

    def offer(self) -> None:
        for request in list(self.scheduler.parked):
            if request.state is State.PENDING:
                self.scheduler.offer(request.rid)

    def receive(self) -> None:
        """Writes what the other engine computed, and takes its first token over."""
        for request in list(self.scheduler.running):
            if request.state is not State.RECEIVING:
                continue
            assert request.computed == 0 and len(request.pages) * PAGE >= request.prompt_tokens
            for position in range(request.prompt_tokens):
                page = request.pages[position // PAGE]
                self.kv[page, position % PAGE] = (tuple(request.tokens[: position + 1]), self.epoch)
            self.started[request.rid] = (request.pages, self.epoch)
            self.scheduler.attach(request)
            self.scheduler.accept(request, 9, -0.5, "prefill")

    def read(self) -> None:
        for request in list(self.scheduler.parked):
            if request.state is State.HELD:
                self.scheduler.finish(request, Finish.LENGTH)

    def settle(self) -> None:
        """Everything ends, given that every wait for the other engine does."""
        self.scheduler.paused = False
        work = sum(len(r.tokens) + r.params.max_new_tokens for r in self.seen.values())
        for _ in range(work * (2 + len(self.seen)) + 2):
            self.offer()
            self.step()
            self.receive()
            self.read()
            self.scheduler.check()
        scheduler = self.scheduler
        assert not scheduler.running and not scheduler.waiting and not scheduler.parked
        assert scheduler.pages.available == self.limits.pages


operations = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 30), st.integers(1, 20), st.sampled_from(KINDS)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.sampled_from([(w,) for w in ("offer", "receive", "read", "retract", "pause", "continue", "all")]),
    ),
    max_size=40,
)


@given(limits, operations)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_schedules_with_split_requests_lose_nothing_and_end(limits, operations):
    engine = SplitEngine(limits)
    for name, *arguments in operations:
        if name == "submit":
            engine.submit_kind(*arguments)
        elif name == "step":
            for _ in range(arguments[0]):
                engine.step()
        elif name == "abort":
            engine.scheduler.abort(f"r{arguments[0]}", "asked")
        elif name == "all":
            engine.scheduler.abort_all("asked")
        elif name == "retract":
            engine.scheduler.retract_all()
        elif name in ("pause", "continue"):
            engine.scheduler.paused = name == "pause"
        else:
            getattr(engine, name)()
        engine.scheduler.check()
    engine.settle()
    for request in engine.seen.values():
        assert request.state in (State.FINISHED, State.ABORTED)
        assert request.generated == len(request.logprobs) == len(request.spans)
        assert not request.pages and request.slot == -1


def engine(pages=8, max_running=4) -> SplitEngine:
    return SplitEngine(Limits(pages, PAGE, max_running, 8, 16))


def test_a_held_request_keeps_its_pages_and_gives_its_slot():
    held = engine(max_running=1)
    held.submit_kind(9, 5, "hold")
    held.submit_kind(3, 1, "whole")
    held.step()
    request = held.seen["r0"]
    assert request.state is State.HELD and len(request.pages) == 3 and request.generated == 1
    held.step()
    assert held.seen["r1"].state is State.FINISHED
    held.scheduler.retract_all()
    assert request.state is State.HELD and len(request.pages) == 3
    held.read()
    assert request.finish is Finish.LENGTH and held.scheduler.pages.available == 8


def test_no_prompt_row_of_a_remote_request_is_ever_planned():
    decode = engine()
    decode.submit_kind(9, 3, "remote")
    assert not decode.step() and decode.seen["r0"].state is State.PENDING
    assert decode.scheduler.pages.available == 8  # nothing is taken before the other side has computed
    decode.offer()
    assert not decode.step() and decode.seen["r0"].state is State.RECEIVING
    assert decode.scheduler.pages.available == 5
    assert decode.scheduler.retract_all() == 0  # its pages are being written
    decode.receive()
    while decode.step():
        pass
    request = decode.seen["r0"]
    assert decode.rows == 2 and request.generated == 3 and request.finish is Finish.LENGTH
    assert request.spans.runs[0] == (1, "prefill")


def test_a_receiving_request_is_not_preempted_and_the_oldest_waits_for_its_pages():
    decode = engine(pages=5)
    decode.submit_kind(8, 12, "whole")
    decode.step()
    decode.submit_kind(3, 2, "remote")
    decode.offer()
    decode.step()
    assert decode.seen["r1"].state is State.RECEIVING
    while decode.step():
        assert decode.seen["r1"].state is State.RECEIVING
    assert decode.seen["r0"].state is State.RUNNING  # no page left: it waits, and lost nothing
    decode.receive()
    decode.settle()
    assert decode.seen["r0"].generated == 12 and decode.seen["r1"].generated == 2


def test_an_offer_is_taken_once():
    decode = engine()
    decode.submit_kind(3, 2, "remote")
    decode.offer()
    with pytest.raises(IllegalTransition):
        decode.scheduler.offer("r0")
    decode.scheduler.check()
