"""Which tokens the next step computes: continuous batching, chunked prefill, preemption. Pure.

Owns every live request, its state and its pages. Promises:
- a step's plan has at most `max_step_tokens` rows, one decode row per running request that is past its
  prompt, the rest prefill chunks, oldest request first;
- pages are taken as positions need them; when none is left the youngest running request is preempted: its
  pages go, its tokens, log-probs and version spans stay, and it is computed again later (same bits, since a
  row's result depends on neither batch nor chunk). The oldest always goes on, so nothing deadlocks;
- requests whose prompts begin alike share the pages of that beginning: a request waits while an older one is
  computing a page that both need, and holds it when it is there. It waits for an older one only, so the oldest
  always goes on; `forget_shared` ends all sharing with what was computed so far;
- tokens appear only in `accept`, so every command acts at a token boundary;
- `check` raises InvariantBroken for a page leaked or doubled, or a token without log-prob or version;
- HELD and RECEIVING requests are never preempted; whoever needs their pages waits as long as engine.pd lets them
  wait at most.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

from turnout.core.errors import InvariantBroken
from turnout.core.types import Finish
from turnout.engine.pages import PageAllocator
from turnout.engine.request_machine import TABLE, Chunk, Event, Request, State
from turnout.engine.sharing import SharedPages, page_keys


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
        self.pages = PageAllocator(limits.pages)
        self._shared = SharedPages()
        self.waiting: list[Request] = []  # by arrival
        self.running: list[Request] = []  # by arrival; RECEIVING ones too
        self.parked: list[Request] = []  # PENDING and HELD ones
        self.paused = False
        self.preemptions = 0
        self._slots = list(range(limits.max_running - 1, -1, -1))
        self._arrivals = 0
        self._by_rid: dict[str, Request] = {}

    def fits(self, tokens: int) -> bool:
        """Whether a request of this many tokens in all can ever be computed."""
        return self._pages_for(tokens) <= self.limits.pages

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
        if not request.tokens or request.params.max_new_tokens < 1:
            raise InvariantBroken(f"request {request.rid} has nothing to compute")
        request.keys = [] if request.remote else page_keys(request.tokens, self.limits.page_tokens)
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
        waits = self._adopt_shared()
        decodes = sum(1 for r in self.running if r.pending == 1)
        left = self.limits.max_step_tokens - decodes
        chunks: list[Chunk] = []
        for request in list(self.running):
            if request.state is not State.RUNNING or request in waits:
                continue
            wanted = 1 if request.pending == 1 else min(request.pending, left)
            count = self._take_pages(request, wanted) if wanted else 0
            if count:
                chunks.append(Chunk(request, request.computed, count, count == request.pending))
                left -= count if request.pending != 1 else 0
        return tuple(chunks)

    def computed(self, chunk: Chunk) -> None:
        """A chunk's KV lies in its pages now."""
        if chunk.request.state is not State.RUNNING or chunk.request.computed != chunk.first:
            raise InvariantBroken(f"{chunk.request.rid}: chunk at {chunk.first} was not the planned one")
        request, size = chunk.request, self.limits.page_tokens
        request.computed += chunk.count
        for index in range(chunk.first // size, min(request.computed // size, len(request.keys))):
            self._shared.offer(request.keys[index], request.pages[index])

    def forget_shared(self) -> None:
        """From here on nobody shares what was computed before: the weights are others now."""
        self._shared.forget()
        for request in self.running:
            request.keys = []

    def accept(self, request: Request, token: int, logprob: float, version: str) -> bool:
        """Appends a sampled token; ends the request at an end id or at its length. Returns whether it ended."""
        request.tokens.append(token)
        request.logprobs.append(logprob)
        request.spans = request.spans.extended(1, version)
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

    def retract_all(self) -> int:
        """Preempts every running request (their KV goes, their tokens stay); returns how many."""
        running = [request for request in self.running if request.state is State.RUNNING]
        for request in running:
            self._preempt(request)
        return len(running)

    def check(self) -> None:
        """Raises InvariantBroken where the books do not balance."""
        live = [*self.running, *self.waiting, *self.parked]
        self.pages.check([page for request in live for page in request.pages])
        stray = self._shared.check(self.pages.taken)
        if stray:
            raise InvariantBroken(f"pages {stray[:9]} are offered and nobody holds them")
        if {r.rid for r in live} != set(self._by_rid) or len(live) != len(self._by_rid):
            raise InvariantBroken("a request is lost or in two queues")
        slots = [r.slot for r in self.running] + self._slots
        if sorted(slots) != list(range(self.limits.max_running)):
            raise InvariantBroken(f"slots leaked or doubled: {sorted(slots)}")
        for request in live:
            if request.generated != len(request.logprobs) or request.generated != len(request.spans):
                raise InvariantBroken(f"{request.rid}: tokens, log-probs and spans differ in length")
            if request.computed > len(request.pages) * self.limits.page_tokens:
                raise InvariantBroken(f"{request.rid}: computed positions without a page")
            queued = request.state in (State.PENDING, State.WAITING)
            if queued and (request.pages or request.computed or request.slot >= 0):
                raise InvariantBroken(f"{request.rid}: waits and holds pages or a slot")
        if any(queue != sorted(queue, key=_arrival) for queue in (self.running, self.waiting)):
            raise InvariantBroken("a queue is out of order")

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.page_tokens)

    def _admit(self) -> None:
        """Oldest first, while a slot is free and the pages suffice for what is known of all running ones,
        with one page more for each to grow into; always at least one."""
        while self.waiting and self._slots:
            request = self.waiting[0]
            owed = sum(self._missing(r) for r in [*self.running, request])
            if self.running and owed + len(self.running) > self.pages.free:
                return
            if request.remote:
                missing = self._missing(request)
                if missing > self.pages.free:
                    return
                request.pages.extend(self.pages.take(missing))
            request.state = TABLE.after(request.state, Event.RESERVE if request.remote else Event.ADMIT)
            request.slot = self._slots.pop()
            insort(self.running, self.waiting.pop(0), key=_arrival)

    def _adopt_shared(self) -> set[Request]:
        """Lets every running request hold the pages of its prompt that are there; returns those that wait for
        an older one to compute the next."""
        computing: set[bytes] = set()
        waits: set[Request] = set()
        size = self.limits.page_tokens
        for request in self.running:
            at = request.computed // size
            while request.computed == at * size and len(request.pages) == at < len(request.keys):
                page = self._shared.find(request.keys[at])
                if page is None:
                    break
                self.pages.hold(page)
                request.pages.append(page)
                request.computed += size
                request.cached += size
                at += 1
            if at < len(request.keys):
                if request.computed == at * size and request.keys[at] in computing:
                    waits.add(request)
                computing.update(request.keys[at:])
        return waits

    def _missing(self, request: Request) -> int:
        return self._pages_for(len(request.tokens)) - len(request.pages)

    def _take_pages(self, request: Request, wanted: int) -> int:
        """How many of the next `wanted` positions have pages now; younger requests give way if need be."""
        missing = self._pages_for(request.computed + wanted) - len(request.pages)
        if missing > self.pages.free:
            self._make_room(missing, self.running[self.running.index(request) + 1 :])
        take = max(0, min(missing, self.pages.free))
        request.pages.extend(self.pages.take(take))
        room = len(request.pages) * self.limits.page_tokens - request.computed
        return min(wanted, room)

    def _make_room(self, wanted: int, younger: list[Request]) -> None:
        """Preempts the youngest until `wanted` pages are free. A RECEIVING request can't be: its pages are
        being written."""
        for request in reversed(younger):
            if wanted <= self.pages.free:
                return
            if request.state is State.RUNNING:
                self._preempt(request)

    def _preempt(self, request: Request) -> None:
        request.state = TABLE.after(request.state, Event.PREEMPT)
        self.preemptions += 1
        self._release(request)
        request.cached = 0
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
            self._return_pages(request)
        del self._by_rid[request.rid]

    def _release(self, request: Request) -> None:
        self._unseat(request)
        self._return_pages(request)

    def _unseat(self, request: Request) -> None:
        self.running.remove(request)
        self._slots.append(request.slot)
        request.slot = -1

    def _return_pages(self, request: Request) -> None:
        self._shared.freed(self.pages.give(request.pages))
        request.pages, request.computed = [], 0


def _arrival(request: Request) -> int:
    return request.arrival


def rows(chunks: Iterable[Chunk]) -> int:
    """Rows of a plan."""
    return sum(chunk.count for chunk in chunks)
