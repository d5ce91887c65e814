"""Random schedules of an engine: the real EngineCore, scheduler, prefix cache and step builder, with a runner that
computes nothing but remembers what lies in each position of the KV cache, and checks it on every row.

What a position holds is the digest of all tokens up to it (and of the namespace) and the epoch of the weights. A
token and its log-prob are functions of that digest, so one that is lost, doubled or made from wrong KV shows.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from turnout.core.errors import EngineBusy, IllegalTransition, UserError
from turnout.core.types import Finish
from turnout.engine import core as core_module
from turnout.engine import memory as memory_module
from turnout.engine.core import PAUSE_MODES, Activation, EngineCore
from turnout.engine.memory import TAGS, WEIGHTS
from turnout.engine.request_machine import TABLE, Event, Request, State
from turnout.engine.routed import RoutedPages
from turnout.engine.settings import EngineSettings
from turnout.engine.step import StepInput, StepOutput
from turnout.protocol.sglang import SamplingParams

PAGE = 16
END_ID = 7
NAMESPACES = ("", "", "", "other")
PAIRS = [(state, event) for state in State for event in Event]
OPERATIONS = {
    "submit": 26, "turn": 5, "split": 5, "step": 38, "abort": 7, "abort_all": 1, "pause": 4, "resume": 6,
    "update": 4, "rename": 1, "flush": 3, "release": 2, "restore": 6, "peer": 6, "illegal": 4,
}  # fmt: skip


class Broken(Exception):
    """A property does not hold."""


def must(holds: object, what: str) -> None:
    if not holds:
        raise Broken(what)


def token_of(digest: int) -> int:
    return digest % 41


def logprob_of(digest: int) -> float:
    return -((digest >> 8) % 1000 + 1) / 256


class FakeWeights:
    """Weights whose content is a number."""

    def __init__(self, _storage: object) -> None:
        self.root = 0

    def stage_folder(self, _folder: Path, may_round: bool = False) -> Any:
        return SimpleNamespace(root=self.root + 1, full=True)

    def activate(self, staged: Any) -> str:
        self.root = staged.root
        return f"root-{staged.root}"

    def release(self) -> int:
        return 1


class FakeRunner:
    """The workers' side: page table, and what lies in each position of each page."""

    def __init__(self, _model: object, settings: EngineSettings) -> None:
        self.storage, self.world = None, World.making
        self.routed = RoutedPages(None, None, settings.pages, settings.page_tokens)
        self.table = [[-1] * 64 for _ in range(settings.max_running_requests)]
        self.digests = [[0] * PAGE for _ in range(settings.pages)]
        self.epochs = [[-1] * PAGE for _ in range(settings.pages)]

    def run(self, step: StepInput) -> StepOutput:
        for change in step.table:
            self.table[change.slot][change.first : change.first + len(change.pages)] = change.pages
        rows = list(zip(step.slots.tolist(), step.positions.tolist(), step.tokens.tolist()))
        groups = [(slot, list(group)) for slot, group in itertools.groupby(rows, key=lambda row: row[0])]
        must(len({slot for slot, _ in groups}) == len(groups), "a request has two chunks in a step")
        must(len(rows) <= self.world.core.settings.max_step_tokens, "a step has more rows than allowed")
        made: list[int] = []
        for slot, group in groups:
            made += self._check(self.world.by_slot(slot), group)
        for slot, position, _ in rows:  # after all checks: what a step computes is not there before its end
            self.write(self.world.by_slot(slot), position)
        self.world.stepped([self.world.by_slot(slot) for slot, _ in groups])
        for row in step.sampling.tolist():
            self.world.drawn(self.world.by_slot(rows[row][0]), rows[row][1] + 1)
        for row, target in step.scored.tolist():
            request = self.world.by_slot(rows[row][0])
            must(request.tokens[rows[row][1] + 1] == target, "a row is scored with another token")
        sampled = [made[row] for row in step.sampling.tolist()]
        scores = [logprob_of(made[row]) for row in step.scored[:, 0].tolist()]
        return StepOutput([token_of(d) for d in sampled], [logprob_of(d) for d in sampled], scores)

    def _check(self, request: Request, group: list[tuple[int, int, int]]) -> list[int]:
        """Everything that a chunk's rows attend to is there and right; the digests of its rows."""
        first, count = group[0][1], len(group)
        expected = self.world.digests(request)
        pages = self.table[request.slot][: -(-(first + count) // PAGE)]
        must(pages == request.pages[: len(pages)], f"{request.rid}: the workers' page table is another")
        held = [digest for page in pages for digest in self.digests[page]][:first]
        must(held == expected[:first], f"{request.rid}: attends to KV of other tokens")
        epochs = [epoch for page in pages for epoch in self.epochs[page]][:first]
        oldest = self.world.seated.setdefault(request.rid, self.world.epoch)
        must(min(epochs, default=oldest) >= oldest, f"{request.rid}: attends to KV of weights before its own")
        must([row[1] for row in group] == list(range(first, first + count)), "rows are out of order")
        tokens = request.tokens[first : first + count]
        must([row[2] for row in group] == tokens, "a row has another token")
        return expected[first : first + count]

    def write(self, request: Request, position: int) -> None:
        page = request.pages[position // PAGE]
        self.digests[page][position % PAGE] = self.world.digests(request)[position]
        self.epochs[page][position % PAGE] = self.world.epoch

    def release_cache(self) -> int:
        self.digests = [[0] * PAGE for _ in self.digests]
        return 1

    def restore_cache(self) -> None:
        """Empty, as released."""


class World:
    """One schedule."""

    making: World

    def __init__(self, seed: int, seen: Counter[tuple[State, Event, bool]]) -> None:
        self.random, self.seen = random.Random(seed), seen
        rng = self.random
        running = rng.randint(1, 4)
        settings = EngineSettings(
            Path(),
            max_total_tokens=PAGE * rng.randint(3, 12),
            max_running_requests=running,
            max_waiting=rng.randint(0, 6),
            max_step_tokens=max(running, rng.choice((8, 20, 33, 64))),
        )
        self.requests: list[Request] = []
        self.ended: Counter[str] = Counter()
        self.labels: dict[str, dict[int, str]] = {}
        self.seated: dict[str, int] = {}  # the epoch in which each running request began
        self._digests: dict[str, list[int]] = {}
        self.epoch, self.steps = 0, 0
        self.split = False  # whether a request was ever split over two engines
        self.families = [[rng.randrange(8, 41) for _ in range(PAGE * 5)] for _ in range(2)]
        World.making = self
        self.core = EngineCore(SimpleNamespace(tokenizer=None), settings, self._over)  # type: ignore[arg-type]

    # what the runner asks

    def by_slot(self, slot: int) -> Request:
        return next(r for r in self.core.scheduler.running if r.slot == slot)

    def digests(self, request: Request) -> list[int]:
        """Of every known position of a request."""
        known = self._digests.setdefault(request.rid, [])
        before = known[-1] if known else hash(request.namespace == "")
        for token in request.tokens[len(known) :]:
            before = hash((before, token)) & (2**62 - 1)
            known.append(before)
        return known

    def drawn(self, request: Request, position: int) -> None:
        labels = self.labels.setdefault(request.rid, {})
        must(position not in labels, f"{request.rid}: the token at {position} is made twice")
        labels[position] = self.core.attested.version

    def stepped(self, planned: list[Request]) -> None:
        """The oldest goes on, whatever the others need."""
        self.steps += 1
        running = [r for r in self.core.scheduler.running if r.state is State.RUNNING]
        split = self.core.scheduler.parked or len(running) < len(self.core.scheduler.running)
        must(split or running[0] in planned, f"{running[0].rid}, the oldest, does not go on")

    def _over(self, request: Request) -> None:
        self.ended[request.rid] += 1

    # operations

    def act(self) -> None:
        name = self.random.choices(list(OPERATIONS), list(OPERATIONS.values()))[0]
        getattr(self, f"_{name}")()
        self.check()

    def check(self) -> None:
        self.core.check()
        scheduler = self.core.scheduler
        live = {r.rid for r in scheduler.running}
        self.seated = {rid: self.seated.get(rid, self.epoch) for rid in live}
        if not self.split:
            arrivals = [r.arrival for r in (*scheduler.running, *scheduler.waiting)]
            must(arrivals == sorted(arrivals), "a younger request was taken before an older one")

    def submit(self, prompt: list[int], **row: Any) -> None:
        rng = self.random
        new = rng.choice((1, 2, 5, 12, 30)) if "logprob_start" not in row else rng.choice((0, 1, 8))
        params = SamplingParams(max_new_tokens=new)
        ends = frozenset((END_ID,)) if rng.random() < 0.5 else frozenset[int]()
        rid, namespace = f"r{len(self.requests)}", rng.choice(NAMESPACES)
        request = Request(rid, prompt, params, 0, ends, namespace=namespace, **row)
        if not self.core.scheduler.fits(len(prompt) + new):
            return
        with contextlib.suppress(EngineBusy):  # the queue is full
            self.core.submit(request)
            self.requests.append(request)
            self.split |= request.hold or request.remote

    def _prompt(self) -> list[int]:
        rng = self.random
        shared = rng.choice(self.families)[: rng.choice((0, 5, 16, 32, 33, 48, 70))]
        return shared + [rng.randrange(8, 41) for _ in range(rng.choice((1, 1, 3, 17)))]

    def _submit(self) -> None:
        for _ in range(self.random.choice((1, 1, 1, 3))):
            prompt = self._prompt()
            row = {"logprob_start": self.random.randrange(len(prompt))} if self.random.random() < 0.15 else {}
            self.submit(prompt, **row)

    def _turn(self) -> None:
        """The next turn of a conversation."""
        if self.requests:
            before = self.random.choice(self.requests)
            self.submit([*before.tokens, *[self.random.randrange(8, 41) for _ in range(4)]])

    def _split(self) -> None:
        self.submit(self._prompt(), **{self.random.choice(("hold", "remote")): True})

    def _step(self) -> None:
        for _ in range(self.random.randint(1, 6)):
            self.core.step()
            self.check()

    def _abort(self) -> None:
        self.core.abort(f"r{self.random.randrange(len(self.requests) + 1)}", "asked")

    def _abort_all(self) -> None:
        self.core.abort_all("asked")

    def _pause(self) -> None:
        self.core.pause(self.random.choice(PAUSE_MODES))

    def _resume(self) -> None:
        self.core.resume()

    def _update(self) -> None:
        rng = self.random
        if WEIGHTS in self.core.memory.released:
            return
        self.epoch += 1
        staged: Any = self.core.weights.stage_folder(Path())
        activation = Activation(staged, f"v{self.epoch}", rng.random() < 0.2, rng.random() < 0.4)
        self.core.activate(activation)
        if activation.abort_all or activation.flush:
            self.seated.clear()

    def _rename(self) -> None:
        self.core.rename(f"{self.core.attested.version}-again")

    def _flush(self) -> None:
        must(self.core.flush_cache() == self.core.idle(), "flush refuses while requests run, and only then")

    def _release(self) -> None:
        """Gives memory back, which is refused while requests run or wait."""
        idle = self.core.idle()
        try:
            self.core.release_memory(self.random.sample(TAGS, self.random.randint(1, len(TAGS))))
        except UserError:
            must(not idle, "memory is not given back though nothing runs")
        else:
            must(idle, "memory was given back while requests run")
            must(self.core.scheduler.pages.free == self.core.settings.pages, "and while pages are held")

    def _restore(self) -> None:
        """Takes released memory again, and brings the weights that went."""
        self.core.memory.resume(None)
        if self.core.memory.stale is not None:
            self._update()

    def _peer(self) -> None:
        """The other engine of split requests does what it is asked for."""
        scheduler = self.core.scheduler
        for request in [*scheduler.parked, *scheduler.running]:
            if self.random.random() < 0.3:
                continue
            if request.state is State.PENDING:
                self.core.offer(request.rid)
            elif request.state is State.HELD:
                self.core.release(request, Finish.LENGTH)
            elif request.state is State.RECEIVING:
                for position in range(request.prompt_tokens):
                    self.runner.write(request, position)
                self.seated[request.rid] = self.epoch
                self.drawn(request, request.prompt_tokens)
                digest = self.digests(request)[request.prompt_tokens - 1]
                self.core.accept_first(request, token_of(digest), logprob_of(digest))

    def _illegal(self) -> None:
        """Events that the table has no row for are refused and change nothing."""
        for state, event in self.random.sample(PAIRS, 12):
            if not TABLE.allows(state, event):
                with contextlib.suppress(IllegalTransition):
                    TABLE.after(state, event)
                    raise Broken(f"{event} in {state} was taken")

    @property
    def runner(self) -> FakeRunner:
        runner = self.core.runner
        assert isinstance(runner, FakeRunner)
        return runner

    def finish(self) -> None:
        """Everything ends, within as many steps as its tokens need."""
        self.core.resume()
        work = sum(len(r.tokens) + r.params.max_new_tokens for r in self.requests)
        for _ in range((work + 8) * (2 + len(self.requests))):
            if self.core.idle():
                break
            worked = self.core.step()
            self._peer()
            self.check()
            must(worked or self.split or self.core.idle(), "requests wait and nothing is planned")
        must(self.core.idle(), "requests do not end")
        for request in self.requests:
            self._check_result(request)
        must(self.core.scheduler.pages.available == self.core.settings.pages, "pages are missing at the end")
        self.core.flush_cache()
        must(self.core.scheduler.pages.free == self.core.settings.pages, "pages are missing after a flush")

    def _check_result(self, request: Request) -> None:
        must(self.ended[request.rid] == 1, f"{request.rid} ended {self.ended[request.rid]} times")
        digests, first = self.digests(request), request.prompt_tokens
        made = digests[first - 1 : len(request.tokens) - 1]
        must(request.output == [token_of(d) for d in made], f"{request.rid}: other tokens than were made")
        must(request.logprobs == [logprob_of(d) for d in made], f"{request.rid}: other log-probs")
        labels = self.labels.get(request.rid, {})
        spans = [label for count, label in request.runs for _ in range(count)]
        must(spans == [labels[first + at] for at in range(len(made))], f"{request.rid}: other versions")
        start = request.logprob_start
        if start is not None and request.finish is not Finish.ABORT:
            must(
                request.input_logprobs == [logprob_of(d) for d in digests[start : first - 1]],
                f"{request.rid}: other log-probs of its prompt",
            )
        if request.finish is Finish.LENGTH and not request.hold:
            must(request.generated == request.params.max_new_tokens, f"{request.rid} ended early")


@contextlib.contextmanager
def fakes(seen: Counter[tuple[State, Event, bool]]) -> Iterator[None]:
    """The fake runner and weights in EngineCore, and the table as it is with its use counted."""
    real = TABLE.after

    def counted(state: State, event: Event) -> State:
        seen[state, event, TABLE.allows(state, event)] += 1
        return real(state, event)

    with (
        mock.patch.object(core_module, "Runner", FakeRunner),
        mock.patch.object(core_module, "LiveWeights", FakeWeights),
        mock.patch.object(memory_module, "give_back", lambda: None),  # a full collection of garbage
        mock.patch.object(TABLE, "after", counted),
    ):
        yield


def run_schedule(seed: int, seen: Counter[tuple[State, Event, bool]]) -> World:
    """One schedule; raises Broken or a TurnoutError where a property does not hold."""
    with fakes(seen):
        world = World(seed, seen)
        for _ in range(world.random.randint(10, 60)):
            world.act()
        world.finish()
    return world


def coverage(seen: Counter[tuple[State, Event, bool]]) -> dict[str, dict[str, int]]:
    """How often each pair of the table was taken or refused."""
    return {
        kind: {f"{s} {e}": seen[s, e, allowed] for s, e in PAIRS if TABLE.allows(s, e) is allowed}
        for kind, allowed in (("taken", True), ("refused", False))
    }
