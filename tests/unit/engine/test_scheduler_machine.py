"""The scheduler: every pair of its table, and random schedules against a KV cache that remembers who wrote what."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turnout.core.errors import IllegalTransition, InvariantBroken
from turnout.core.types import Finish
from turnout.engine.pages import PageAllocator
from turnout.engine.request_machine import TABLE, Event, Request, State
from turnout.engine.scheduler_machine import Limits, Scheduler
from turnout.protocol.sglang import SamplingParams

PAGE = 4


def prompt_of(family: int, length: int) -> list[int]:
    """Prompts of one family begin alike; those of two differ from their fifth token on."""
    return [at if at < 4 else 1000 * family + at for at in range(length)]


class FakeEngine:
    """A scheduler, and pages that hold what keys and values depend on: all tokens up to a position, and the
    weights (`epoch`) that they were computed with."""

    def __init__(self, limits: Limits) -> None:
        self.scheduler, self.limits = Scheduler(limits), limits
        self.kv: dict[tuple[int, int], tuple[tuple[int, ...], int]] = {}
        self.epoch, self.rows = 0, 0
        self.started: dict[str, tuple[list[int], int]] = {}
        self.seen: dict[str, Request] = {}
        self.clock = 0

    def update(self) -> None:
        """New weights, while running requests go on with the KV that they have."""
        self.epoch += 1
        self.scheduler.forget_cache()

    def submit(self, prompt: int, new: int, family: int = 0) -> None:
        if self.scheduler.full or not self.scheduler.fits(prompt + new):
            return
        request = Request(
            f"r{len(self.seen)}", prompt_of(family, prompt), SamplingParams(max_new_tokens=new), 0
        )
        self.seen[request.rid] = request
        self.scheduler.submit(request)

    def step(self) -> bool:
        chunks = self.scheduler.plan()
        assert sum(c.count for c in chunks) <= self.limits.max_step_tokens
        assert len({c.request.rid for c in chunks}) == len(chunks)
        running = [r for r in self.scheduler.running if r.generated and r.pending == 1]
        planned = {c.request.rid for c in chunks}
        starved = [r for r in running if r.rid not in planned]
        assert not starved or self.scheduler.pages.available == 0 or self.scheduler.paused
        for request in self.scheduler.running:  # one that has taken over pages has begun
            known = self.started.get(request.rid)
            if known is None or known[0] is not request.pages:
                self.started[request.rid] = (request.pages, self.epoch)
        for chunk in chunks:
            request = chunk.request
            assert chunk.first == request.computed and chunk.count >= 1
            self.rows += chunk.count
            for position in range(chunk.first, chunk.first + chunk.count):
                page = request.pages[position // PAGE]
                self.kv[page, position % PAGE] = (tuple(request.tokens[: position + 1]), self.epoch)
        for chunk in chunks:
            request, end = chunk.request, chunk.first + chunk.count
            older = False
            for position in range(end):  # attention reads all of these
                held, epoch = self.kv[request.pages[position // PAGE], position % PAGE]
                assert held == tuple(request.tokens[: position + 1])
                assert epoch >= self.started[request.rid][1]
                older = older or epoch < self.epoch
            self.scheduler.computed(chunk)
            self.started[request.rid] = (
                request.pages,
                self.started[request.rid][1],
            )  # a twin may have taken over
            assert chunk.samples == (end == len(request.tokens))
            if chunk.samples:
                self.clock += 1
                self.scheduler.accept(request, 100 + self.clock % 7, -0.5, f"v{self.clock // 50}")
                marks = [at for start, end in request.mixed_runs for at in range(start, end)]
                assert marks == sorted(set(marks)) and (request.generated - 1 in marks) == older
        self.scheduler.check()
        return bool(chunks)

    def drain(self) -> None:
        self.scheduler.paused = False
        work = sum(len(r.tokens) + r.params.max_new_tokens for r in self.seen.values())
        for _ in range(work * (2 + len(self.seen)) + 2):
            if not self.step():
                break
        assert not self.scheduler.running and not self.scheduler.waiting
        assert self.scheduler.pages.available == self.limits.pages


limits = st.builds(
    Limits,
    pages=st.integers(1, 12),
    page_tokens=st.just(PAGE),
    max_running=st.integers(1, 4),
    max_waiting=st.integers(0, 5),
    max_step_tokens=st.integers(4, 12),
)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 30), st.integers(1, 20), st.integers(0, 1)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.sampled_from([("abort_all",), ("retract",), ("pause",), ("continue",), ("update",)]),
    ),
    max_size=40,
)


@given(limits, operations)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_schedules_lose_nothing_and_end(limits, operations):
    engine = FakeEngine(limits)
    for name, *arguments in operations:
        if name == "submit":
            engine.submit(*arguments)
        elif name == "step":
            for _ in range(arguments[0]):
                engine.step()
        elif name == "abort":
            engine.scheduler.abort(f"r{arguments[0]}", "asked")
        elif name == "abort_all":
            engine.scheduler.abort_all("asked")
        elif name == "update":
            engine.update()
        elif name == "retract":
            engine.scheduler.retract_all()
        else:
            engine.scheduler.paused = name == "pause"
        engine.scheduler.check()
    engine.drain()
    for request in engine.seen.values():
        assert request.state in (State.FINISHED, State.ABORTED)
        assert request.generated == len(request.logprobs) == len(request.spans)
        if request.state is State.FINISHED:
            assert request.finish is Finish.LENGTH and request.generated == request.params.max_new_tokens
        length = request.prompt_tokens
        assert request.tokens[:length] in (prompt_of(0, length), prompt_of(1, length))


def machine(pages=8, max_running=4, max_waiting=8, max_step_tokens=16) -> FakeEngine:
    return FakeEngine(Limits(pages, PAGE, max_running, max_waiting, max_step_tokens))


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("event", list(Event))
def test_every_pair_of_the_table(state, event):
    allowed = {
        (State.WAITING, Event.ADMIT),
        (State.RUNNING, Event.PREEMPT),
        (State.RUNNING, Event.FINISH),
        (State.PENDING, Event.OFFER),
        (State.WAITING, Event.RESERVE),
        (State.RECEIVING, Event.ATTACH),
        (State.RUNNING, Event.HOLD),
        (State.HELD, Event.FINISH),
        *[(s, Event.ABORT) for s in State if s not in (State.FINISHED, State.ABORTED)],
    }
    if (state, event) in allowed:
        TABLE.after(state, event)
    else:
        with pytest.raises(IllegalTransition):
            TABLE.after(state, event)


def test_running_requests_decode_while_a_long_prompt_is_cut_into_chunks():
    engine = machine(pages=40, max_step_tokens=8)
    engine.submit(3, 20)
    engine.step()
    engine.submit(30, 2)
    sizes = []
    for _ in range(5):
        plan = engine.scheduler.plan()
        sizes.append(sorted(c.count for c in plan))
        for chunk in plan:
            engine.scheduler.computed(chunk)
            if chunk.samples:
                engine.scheduler.accept(chunk.request, 5, -1.0, "v")
    assert sizes == [[1, 7], [1, 7], [1, 7], [1, 7], [1, 2]]


def test_the_youngest_is_preempted_and_keeps_its_tokens():
    engine = machine(pages=6)
    engine.submit(8, 12)
    engine.submit(7, 12)
    while not engine.scheduler.preemptions:
        assert engine.step()
    old, young = engine.seen["r0"], engine.seen["r1"]
    assert old.state is State.RUNNING and young.state is State.WAITING
    assert young.generated > 0 and young.generated == len(young.logprobs) and not young.pages
    kept = list(young.tokens)
    engine.drain()
    assert young.tokens[: len(kept)] == kept and young.finish is Finish.LENGTH


def test_requests_are_admitted_in_order_of_arrival():
    engine = machine(max_running=1)
    for _ in range(3):
        engine.submit(2, 2)
    engine.drain()
    ends = sorted(engine.seen.values(), key=lambda r: r.arrival)
    assert [r.rid for r in ends] == ["r0", "r1", "r2"]


def test_abort_is_by_exact_id():
    engine = machine()
    scheduler = engine.scheduler
    for rid in ("job-1", "job-10", "job-100"):
        scheduler.submit(Request(rid, [1, 2], SamplingParams(max_new_tokens=4), 0))
    engine.step()
    assert scheduler.abort("job-1", "asked").rid == "job-1"
    assert scheduler.abort("job-1", "asked") is None and scheduler.abort("", "asked") is None
    assert {r.rid for r in scheduler.running} == {"job-10", "job-100"}
    scheduler.check()


def test_an_end_id_ends_a_request_and_spans_follow_the_version():
    engine = machine()
    scheduler = engine.scheduler
    request = Request("a", [1, 2], SamplingParams(max_new_tokens=9), 0, frozenset({7}))
    scheduler.submit(request)
    for token, version in ((3, "v1"), (4, "v1"), (7, "v2")):
        (chunk,) = scheduler.plan()
        scheduler.computed(chunk)
        ended = scheduler.accept(request, token, -1.0, version)
    assert ended and request.finish is Finish.STOP and request.output == [3, 4, 7]
    assert request.spans.runs == ((2, "v1"), (1, "v2"))


def test_a_paused_scheduler_plans_nothing_and_goes_on_where_it_was():
    engine = machine()
    engine.submit(5, 5)
    engine.step()
    engine.scheduler.paused = True
    assert engine.scheduler.plan() == () and engine.scheduler.running
    engine.drain()
    assert engine.seen["r0"].generated == 5


def test_submit_refuses_what_its_caller_must_have_refused():
    scheduler = machine(pages=2).scheduler
    scheduler.submit(Request("a", [1], SamplingParams(max_new_tokens=1), 0))
    for request in (
        Request("a", [1], SamplingParams(max_new_tokens=1), 0),
        Request("b", [1] * 5, SamplingParams(max_new_tokens=4), 0),
        Request("c", [], SamplingParams(max_new_tokens=1), 0),
        Request("d", [1], SamplingParams(max_new_tokens=0), 0),  # asks for nothing
    ):
        with pytest.raises(InvariantBroken):
            scheduler.submit(request)
    scheduler.check()


def test_pages_are_never_doubled_and_faults_of_the_books_are_found():
    pages = PageAllocator(4)
    held = pages.take(3)
    pages.check(held)
    for wrong in (held[:2], [*held, held[0]], [*held, 3]):
        with pytest.raises(InvariantBroken):
            pages.check(wrong)
    with pytest.raises(InvariantBroken):
        pages.take(2)
    pages.give(held)
    with pytest.raises(InvariantBroken):
        pages.give(held[:1])
    pages.check([])


def test_a_prompt_that_many_requests_share_is_computed_once():
    engine = machine(pages=60, max_running=8, max_step_tokens=64)
    for _ in range(8):
        engine.submit(19, 2)
    engine.drain()
    requests = list(engine.seen.values())
    assert [r.cached for r in requests] == [0] + [16] * 7  # four full pages of four tokens
    assert engine.rows == 19 + 7 * 3 + 8  # the prompt once, seven tails, one more decoded token each


def test_prompts_that_part_share_only_what_is_alike():
    engine = machine(pages=60, max_running=8, max_step_tokens=64)
    engine.submit(19, 2, 0)
    engine.submit(19, 2, 1)
    engine.drain()
    assert [r.cached for r in engine.seen.values()] == [0, 4]


def test_tokens_on_kv_of_older_weights_are_marked_until_it_is_computed_again():
    engine = machine(pages=60, max_running=8, max_step_tokens=64)
    engine.submit(6, 20)
    one = engine.seen["r0"]
    engine.step()
    for _ in range(2):
        engine.update()  # the second of the two is of running requests that are marked already
        engine.step()
    engine.scheduler.retract_all()
    for _ in range(3):
        engine.step()
    engine.update()
    engine.drain()
    assert one.mixed_runs == [(1, 3), (6, 20)]
    assert one.kv_mixed(8) == [(1, 3), (6, 8)] and one.kv_mixed(2) == [(1, 2)]


def test_after_an_update_nothing_computed_before_is_shared():
    engine = machine(pages=60, max_running=8, max_step_tokens=64)
    engine.submit(19, 30)
    engine.step()
    engine.update()
    engine.submit(19, 2)
    engine.drain()
    assert [r.cached for r in engine.seen.values()] == [0, 0]


def test_pages_outlive_the_request_that_computed_them_while_another_holds_them():
    engine = machine(pages=60, max_running=8, max_step_tokens=64)
    for _ in range(3):
        engine.submit(19, 20)
    engine.step()
    engine.step()
    engine.scheduler.abort("r0", "asked")
    engine.submit(19, 2)
    engine.drain()
    assert engine.seen["r3"].cached == 16


def test_a_second_turn_takes_prompt_and_answer_of_the_first_from_the_cache():
    engine = machine(pages=60, max_step_tokens=64)
    engine.submit(10, 11)
    engine.drain()
    first = engine.seen["r0"]
    turn = Request("turn", [*first.tokens, 7, 7, 7], SamplingParams(max_new_tokens=3), 0)
    engine.seen["turn"] = turn
    engine.scheduler.submit(turn)
    engine.drain()
    assert turn.cached == 20  # of the 21 tokens the last was never computed, and pages have 4


def test_namespaces_share_nothing():
    engine = machine(pages=60, max_step_tokens=64)
    for at, namespace in enumerate(("", "a", "a", "b")):
        request = Request(f"r{at}", prompt_of(0, 9), SamplingParams(max_new_tokens=2), 0)
        request.namespace = namespace
        engine.seen[request.rid] = request
        engine.scheduler.submit(request)
        engine.drain()
    assert [r.cached for r in engine.seen.values()] == [0, 0, 8, 0]


def test_cached_pages_are_evicted_before_anyone_is_preempted():
    engine = machine(pages=6)
    for family in range(5):
        engine.submit(12, 8, family)
        engine.drain()
        assert engine.scheduler.pages.free < 6  # what was computed stays
    assert engine.scheduler.preemptions == 0


def test_a_preempted_request_takes_its_own_pages_back():
    engine = machine(pages=60, max_step_tokens=64)
    engine.submit(18, 9)
    engine.step()
    engine.scheduler.retract_all()
    rows = engine.rows
    engine.step()
    assert engine.rows - rows == 19 - 16 and engine.seen["r0"].cached == 0
    engine.drain()


def test_flush_drops_what_nobody_holds():
    engine = machine(pages=60, max_step_tokens=64)
    engine.submit(18, 2)
    engine.drain()
    engine.scheduler.flush_cache()
    assert engine.scheduler.pages.free == 60
    engine.submit(18, 2)
    engine.drain()
    assert engine.seen["r1"].cached == 0


def test_a_request_waits_for_pages_that_are_free_or_shared_with_running_ones():
    engine = machine(pages=9, max_running=3, max_step_tokens=64)
    engine.submit(17, 3)
    engine.step()
    engine.submit(17, 3)  # shares four pages with the first, needs one of its own
    engine.submit(17, 3, family=1)  # parts after the first page, needs four
    engine.step()
    assert [r.rid for r in engine.scheduler.running] == ["r0", "r1"]
    assert engine.scheduler.waiting[0].seen[1] == 1
    engine.drain()
    assert engine.scheduler.preemptions == 0


def test_when_two_compute_the_same_page_one_of_both_is_kept():
    engine = machine(pages=60, max_running=2, max_step_tokens=64)
    same = [Request(f"s{i}", [1, 2, 3], SamplingParams(max_new_tokens=9), 0) for i in range(2)]
    for request in same:
        engine.scheduler.submit(request)
    for _ in range(4):
        for chunk in engine.scheduler.plan():
            engine.scheduler.computed(chunk)
            engine.scheduler.accept(chunk.request, 50, -1.0, "v")
    assert same[0].pages[0] == same[1].pages[0] and same[0].depth == same[1].depth == 1
    engine.scheduler.check()


def test_log_probs_of_the_prompt_are_asked_for_once_and_survive_preemption():
    engine = machine(pages=60, max_step_tokens=8)
    engine.submit(30, 2)
    engine.drain()  # all of the prompt is cached now
    scheduler = engine.scheduler
    request = Request("s", prompt_of(0, 30), SamplingParams(max_new_tokens=0), 0, logprob_start=10)
    scheduler.submit(request)
    asked: list[int] = []
    while request.finish is None:
        for chunk in scheduler.plan():
            assert not chunk.samples
            asked += chunk.scores
            scheduler.computed(chunk, [-float(at) for at in chunk.scores])
            scheduler.check()
        if len(asked) == 14 and not scheduler.preemptions:
            scheduler.retract_all()
            scheduler.flush_cache()
    assert request.cached == 8  # pages before position 10 only
    assert asked == list(range(10, 29)) and request.input_logprobs == [-float(at) for at in asked]
    assert request.finish is Finish.LENGTH and request.output == [] and scheduler.preemptions == 1


def test_a_log_prob_of_the_prompt_too_few_or_too_many_is_found():
    scheduler = machine().scheduler
    scheduler.submit(Request("s", [1, 2, 3], SamplingParams(max_new_tokens=1), 0, logprob_start=0))
    (chunk,) = scheduler.plan()
    with pytest.raises(InvariantBroken, match="of its prompt"):
        scheduler.computed(chunk, [-1.0])
