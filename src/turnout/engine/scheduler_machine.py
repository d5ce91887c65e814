"""Which tokens the next step computes: continuous batching, chunked prefill, preemption. Pure.

Owns every live request, its state and its pages. Promises:
- a step's plan has at most `max_step_tokens` rows, one decode row per running request that is past its
  prompt, the rest prefill chunks, oldest request first;
- pages are taken as positions need them; where none is free the longest unused cached page is evicted; when
  none is left the youngest running request is preempted: it gives up its pages, its tokens, log-probs and
  version spans stay, and it is computed again later (same bits, since a row's result depends on neither batch
  nor chunk). The oldest always goes on, so nothing deadlocks;
- full pages that were computed enter the prefix cache (engine.radix) at once and stay when their request ends.
  A request takes over the pages of its own beginning that are there, and waits while an older one computes the
  next in this very step. `forget_cache` ends all sharing with what was computed so far;
- planning costs the running requests and the pages moved, not the pages cached nor the lengths of prompts;
- tokens appear only in `accept`, so every command acts at a token boundary;
- `check` raises InvariantBroken for a page leaked or doubled, or a token without log-prob or version;
- HELD and RECEIVING requests are never preempted; whoever needs their pages waits as long as engine.pd lets them
  wait at most.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from turnout.core.errors import InvariantBroken
from turnout.core.types import Finish
from turnout.engine.page_pool import PagePool
from turnout.engine.radix import Node, PageKey
from turnout.engine.request_machine import TABLE, Chunk, Event, Request, State


@dataclass(frozen=True)
class Limits:
    """All counts; see EngineSettings."""

    pages: int
    page_tokens: int
    max_running: int
    max_waiting: int
    max_step_tokens: int


class Scheduler:
    """See the module. Not thread-safe: one thread owns it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pages = PagePool(limits.pages, limits.page_tokens)
        self.waiting: list[Request] = []  # by arrival
        self.running: list[Request] = []  # by arrival; RECEIVING ones too
        self.parked: list[Request] = []  # PENDING and HELD ones
        self.reserved: list[Request] = []  # RECEIVING since the last `plan`; whoever plans empties it
        self.paused = False
        self.preemptions = 0
        self._slots = list(range(limits.max_running - 1, -1, -1))
        self._arrivals = 0
        self._by_rid: dict[str, Request] = {}

    def fits(self, tokens: int) -> bool:
        """Whether a request of this many tokens in all can ever be computed."""
        return self.pages.pages_for(tokens) <= self.limits.pages

    def knows(self, rid: str) -> bool:
        return rid in self._by_rid

    @property
    def full(self) -> bool:
        """Whether one more request would exceed the queue's limit."""
        queued = len(self.waiting) + len(self.parked)
        return queued >= self.limits.max_waiting + self.limits.max_running - len(self.running)

    def submit(self, request: Request) -> None:
        """Queues a request. The caller has refused duplicates, a full queue and what can never fit."""
        if self.knows(request.rid) or not self.fits(len(request.tokens) + request.params.max_new_tokens):
            raise InvariantBroken(f"request {request.rid} is known already or can never fit")
        scores_only = request.params.max_new_tokens == 0
        if not request.tokens or (scores_only and request.logprob_start is None):
            raise InvariantBroken(f"request {request.rid} has nothing to compute")
        self._arrivals += 1
        request.arrival = self._arrivals
        self._by_rid[request.rid] = request
        if request.remote:
            request.state = State.PENDING
            self.parked.append(request)
        else:
            self.waiting.append(request)

    def plan(self) -> tuple[Chunk, ...]:
        """The next step; empty while paused or idle. Takes the pages that the step writes to."""
        if self.paused:
            return ()
        self._admit()
        left = self.limits.max_step_tokens - sum([len(r.tokens) - r.computed == 1 for r in self.running])
        claims: set[tuple[Node | None, PageKey]] = set()  # first pages that older ones compute in this step
        chunks: list[Chunk] = []
        for request in list(self.running):
            if request.state is not State.RUNNING:
                continue  # RECEIVING, or preempted by an older one
            if len(request.tokens) - request.computed == 1:
                if self._take_pages(request, 1):
                    chunks.append(_chunk(request, 1))
                continue
            self.pages.adopt(request)
            claim = self.pages.next_page(request)
            if claim in claims and self.pages.may_adopt(request):
                continue
            count = self._take_pages(request, min(request.pending, left))
            if count:
                claims.add(claim)
                chunks.append(_chunk(request, count))
                left -= count
        return tuple(chunks)

    def computed(self, chunk: Chunk, scores: Sequence[float] = ()) -> bool:
        """A chunk's KV lies in its pages now, and its rows gave these log-probs of prompt tokens. Returns whether
        that ended the request, which it does to one that asks for nothing else."""
        request = chunk.request
        if request.state is not State.RUNNING or request.computed != chunk.first:
            raise InvariantBroken(f"{request.rid}: chunk at {chunk.first} was not the planned one")
        if len(scores) != len(chunk.scores):
            raise InvariantBroken(f"{request.rid}: {len(scores)} log-probs for {chunk.scores} of its prompt")
        request.computed += chunk.count
        request.input_logprobs.extend(scores)
        self.pages.share(request)
        if request.params.max_new_tokens == 0 and not request.pending:
            self.finish(request, Finish.LENGTH)
        return request.finish is not None

    def flush_cache(self) -> None:
        """Frees all cached pages that no request holds."""
        self.pages.flush()

    def forget_cache(self) -> None:
        """From here on nobody shares what was computed before: the weights are others now. Requests that run go
        on with what they hold: their tokens are marked from here on, until they are computed again."""
        for request in self.running:
            request.mixed = request.mixed or request.computed > 0
        self.pages.forget()

    def accept(self, request: Request, token: int, logprob: float, version: str) -> bool:
        """Appends a sampled token; ends the request at an end id or at its length, unless it is to be held.
        Returns whether it ended."""
        request.tokens.append(token)
        request.logprobs.append(logprob)
        if request.mixed:  # before `runs`, which says to readers how many tokens there are
            at, marks = request.generated - 1, request.mixed_runs
            if marks and marks[-1][1] == at:
                marks[-1] = (marks[-1][0], at + 1)
            else:
                marks.append((at, at + 1))
        if request.runs and request.runs[-1][1] == version:
            request.runs[-1] = (request.runs[-1][0] + 1, version)
        else:
            request.runs.append((1, version))
        if request.hold:
            return False
        if token in request.end_ids:
            self.finish(request, Finish.STOP)
        elif request.generated >= request.params.max_new_tokens:
            self.finish(request, Finish.LENGTH)
        return request.finish is not None

    def hold(self, request: Request) -> None:
        """HELD: the request keeps its pages, computes no more and gives its slot to others; `finish` or `abort`
        returns the pages."""
        request.state = TABLE.after(request.state, Event.HOLD)
        self._unseat(request)
        self.parked.append(request)

    def offer(self, rid: str) -> None:
        """The prompt of a PENDING request was computed elsewhere: it waits for a slot and pages now, among the
        others by age. Raises IllegalTransition in any other state."""
        request = self._by_rid[rid]
        request.state = TABLE.after(request.state, Event.OFFER)
        self.parked.remove(request)
        insort(self.waiting, request, key=_arrival)

    def attach(self, request: Request) -> None:
        """The KV of the whole prompt lies in the pages of a RECEIVING request; `accept` of its first token must
        follow. From here on it is a request like any other, and may be preempted and computed again."""
        request.state = TABLE.after(request.state, Event.ATTACH)
        request.computed, request.remote = request.prompt_tokens, False

    def finish(self, request: Request, finish: Finish) -> None:
        """Ends a running or held request by STOP or LENGTH."""
        self._leave(request, Event.FINISH)
        request.finish = finish

    def abort(self, rid: str, message: str) -> Request | None:
        """Ends the request with exactly this id; None where there is none."""
        request = self._by_rid.get(rid)
        if request is not None:
            self._leave(request, Event.ABORT)
            request.finish, request.message = Finish.ABORT, message
        return request

    def abort_all(self, message: str) -> list[Request]:
        ended = [self.abort(rid, message) for rid in list(self._by_rid)]
        return [request for request in ended if request is not None]

    def abort_held(self, message: str) -> list[Request]:
        """Ends the HELD requests: their KV is of no use any more and can't be made again."""
        held = [request for request in self.parked if request.state is State.HELD]
        for request in held:
            self.abort(request.rid, message)
        return held

    def retract_all(self) -> int:
        """Preempts every running request (their KV goes, their tokens stay); returns how many."""
        running = [request for request in self.running if request.state is State.RUNNING]
        for request in running:
            self._preempt(request)
        return len(running)

    def check(self) -> None:
        """Raises InvariantBroken where the books do not balance."""
        live = [*self.running, *self.waiting, *self.parked]
        self.pages.check([*self.running, *self.parked])
        if {r.rid for r in live} != set(self._by_rid) or len(live) != len(self._by_rid):
            raise InvariantBroken("a request is lost or in two queues")
        slots = [r.slot for r in self.running] + self._slots
        if sorted(slots) != list(range(self.limits.max_running)):
            raise InvariantBroken(f"slots leaked or doubled: {sorted(slots)}")
        for request in live:
            if request.generated != len(request.logprobs) or request.generated != len(request.spans):
                raise InvariantBroken(f"{request.rid}: tokens, log-probs and spans differ in length")
            queued = request.state in (State.PENDING, State.WAITING)
            if queued and (request.node or request.pages or request.computed or request.slot >= 0):
                raise InvariantBroken(f"{request.rid}: waits and holds pages or a slot")
        if any(queue != sorted(queue, key=_arrival) for queue in (self.running, self.waiting)):
            raise InvariantBroken("a queue is out of order")

    def _admit(self) -> None:
        """Oldest first, while a slot is free and the pages suffice for what is known of all running ones,
        with one page more for each to grow into; always at least one."""
        if not self.waiting or not self._slots:
            return
        owed = sum([self.pages.pages_for(len(r.tokens)) - len(r.pages) for r in self.running])
        while self.waiting and self._slots:
            request = self.waiting[0]
            missing = self.pages.pages_for(len(request.tokens))
            owed += missing - (0 if request.remote else self.pages.held(request))
            if self.running and owed + len(self.running) > self.pages.available:
                return
            if request.remote:
                if missing > self.pages.available:
                    return
                self.pages.extend(request, len(request.tokens))
                self.reserved.append(request)
                owed -= missing
            else:
                self.pages.open(request)
            request.state = TABLE.after(request.state, Event.RESERVE if request.remote else Event.ADMIT)
            request.slot = self._slots.pop()
            insort(self.running, self.waiting.pop(0), key=_arrival)

    def _take_pages(self, request: Request, wanted: int) -> int:
        """How many of the next `wanted` positions have pages now; cached pages go, then younger requests give
        way, if need be."""
        room = len(request.pages) * self.limits.page_tokens - request.computed
        if room < wanted:
            missing = self.pages.pages_for(request.computed + wanted) - len(request.pages)
            if missing > self.pages.available:
                self._make_room(missing, self.running[self.running.index(request) + 1 :])
            self.pages.extend(request, request.computed + wanted)
            room = len(request.pages) * self.limits.page_tokens - request.computed
        return min(wanted, room)

    def _make_room(self, wanted: int, younger: list[Request]) -> None:
        """Preempts the youngest until `wanted` pages are there. A RECEIVING request can't be: its pages are
        being written."""
        for request in reversed(younger):
            if wanted <= self.pages.available:
                return
            if request.state is State.RUNNING:
                self._preempt(request)

    def _preempt(self, request: Request) -> None:
        request.state = TABLE.after(request.state, Event.PREEMPT)
        self.preemptions += 1
        self._release(request)
        request.preempted, request.mixed = True, False
        insort(self.waiting, request, key=_arrival)

    def _leave(self, request: Request, event: Event) -> None:
        state = request.state
        request.state = TABLE.after(state, event)
        if state in (State.RUNNING, State.RECEIVING):
            self._release(request)
        elif state is State.WAITING:
            self.waiting.remove(request)
        else:
            self.parked.remove(request)
            self.pages.release(request)
        del self._by_rid[request.rid]

    def _release(self, request: Request) -> None:
        self._unseat(request)
        self.pages.release(request)

    def _unseat(self, request: Request) -> None:
        self.running.remove(request)
        self._slots.append(request.slot)
        request.slot = -1


def _chunk(request: Request, count: int) -> Chunk:
    """The next `count` positions of a request."""
    first, unscored = request.computed, request.unscored
    samples = count == request.pending and request.params.max_new_tokens > 0
    scored = unscored is not None and unscored < first + count
    return Chunk(request, first, count, samples, unscored if scored else None)


def _arrival(request: Request) -> int:
    return request.arrival
