"""The engine without threads or HTTP: scheduler, runner and live weights behind one set of commands.

Owned by one thread. Every command acts between two steps, so at a token boundary. Promises: tokens carry the
label of the weights that made them; an engine whose memory is released, or whose weights are stale since then, is
fenced (nothing is served until a full update); what was refused changed nothing.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from turnout.core.errors import EngineBusy, Fault, UserError, VersionUnmet, WeightError, WeightsUnknown
from turnout.core.types import Finish
from turnout.engine.memory import WEIGHTS, Memory, Released
from turnout.engine.metrics import EngineMetrics
from turnout.engine.model import LoadedModel, load_model
from turnout.engine.parallel import ParallelEngine
from turnout.engine.parallel import start as start_ranks
from turnout.engine.parallel_plan import RankReport
from turnout.engine.request_machine import Chunk, Request
from turnout.engine.runner import Runner
from turnout.engine.sampler import Draw
from turnout.engine.scheduler_machine import Limits, Scheduler
from turnout.engine.settings import EngineSettings
from turnout.engine.staged import Staged
from turnout.engine.step import StepBuilder
from turnout.engine.text import StopWatch
from turnout.engine.weights import LiveWeights

PAUSE_MODES = ("abort", "retract", "in_place")


@dataclass(frozen=True)
class Attested:
    """What is served: `root` was computed from the live tensors at wall time `at`; `verified` is full where all
    of them were read for that, incremental where tensors kept the digest of an earlier update."""

    version: str
    root: str
    at: float
    level: str = "memory"
    verified: str = "full"


@dataclass(frozen=True)
class Load:
    """Counts at the last token boundary; `prompt_rows`: positions of prompts computed, also again."""

    running: int = 0
    waiting: int = 0
    used_pages: int = 0
    steps: int = 0
    tokens: int = 0
    preempted: int = 0
    prompt_rows: int = 0


@dataclass(frozen=True)
class Activation:
    """One update: `label` for the tokens from now on; `flush` recomputes the KV of running requests on the
    new weights, else they go on with what they have."""

    staged: Staged
    label: str
    abort_all: bool
    flush: bool


@dataclass(frozen=True)
class Activated:
    """`met` requests were there when the weights changed; the engine stood still for `pause_s` seconds."""

    attested: Attested
    met: int
    pause_s: float


class EngineCore:
    """See the module. `on_end` is called on the owning thread with every request that ends, `on_phase` with every
    split request (engine.pd) that was queued, held, given pages to receive into, or ended."""

    def __init__(
        self,
        model: LoadedModel,
        settings: EngineSettings,
        on_end: Callable[[Request], None],
        ranks: ParallelEngine | None = None,
    ) -> None:
        self.settings, self.model, self._ranks = settings, model, ranks
        self.runner = Runner(model, settings) if ranks is None else ranks.runner
        self.weights = LiveWeights(self.runner.storage)
        self._steps = StepBuilder(settings.max_running_requests)
        self.scheduler = Scheduler(
            Limits(
                settings.pages,
                settings.page_tokens,
                settings.max_running_requests,
                settings.max_waiting,
                settings.max_step_tokens,
            )
        )
        self.memory = Memory(self.runner, self.weights)
        self.load = Load()
        self.metrics = EngineMetrics()
        self._on_end = on_end
        self.on_phase: Callable[[Request], None] = _nobody
        self._watches: dict[str, StopWatch] = {}
        staged = self.weights.stage_folder(settings.model_path, may_round=True)
        self.attested = Attested(settings.weight_version, self.weights.activate(staged), time.time())

    @classmethod
    def build(cls, settings: EngineSettings, on_end: Callable[[Request], None]) -> EngineCore:
        """Loads the model in this process, or over `settings.tp_size` of them; raises ModelError."""
        if settings.tp_size == 1:
            return cls(load_model(settings), settings, on_end)
        ranks = start_ranks(settings)
        return cls(ranks.model, settings, on_end, ranks)

    @property
    def fenced(self) -> str | None:
        """Why nothing can be served now; None where it can."""
        return self.memory.fence

    @property
    def reports(self) -> tuple[RankReport, ...]:
        """One per process of this engine, rank 0's first."""
        if self._ranks is not None:
            return self._ranks.reports
        storage = self.weights.storage
        held = sum(storage.live(buffer).nbytes for buffer in {spec.buffer for spec in storage.specs.values()})
        return (RankReport(0, os.getpid(), held, self.runner.cache.nbytes),)

    def close(self) -> None:
        """Ends the other ranks, if there are any."""
        if self._ranks is not None:
            self._ranks.crew.close()

    def submit(self, request: Request) -> None:
        """Queues a request; raises UserError for a duplicate id, EngineBusy (phase "fenced" or "queue"),
        VersionUnmet."""
        if self.fenced is not None:
            raise EngineBusy(self.settings.engine_id, "fenced", self.attested.version, self.fenced)
        constraint, served = request.constraint, self.attested
        if constraint is not None and not constraint.met_by(served.version):
            reason = f"the request asks for {constraint}"
            raise VersionUnmet(self.settings.engine_id, served.version, served.root, reason)
        if self.scheduler.knows(request.rid):
            raise UserError(Fault("rid", request.rid, "is in use by a request that still runs"))
        if self.scheduler.full:
            reason = f"{len(self.scheduler.waiting)} requests wait already"
            raise EngineBusy(self.settings.engine_id, "queue", self.attested.version, reason)
        if request.params.max_new_tokens == 0 and request.logprob_start is None:
            request.finish = Finish.LENGTH
            self._on_end(request)
            return
        self.scheduler.submit(request)
        self.metrics.submitted(request)
        if request.params.stop:
            self._watches[request.rid] = StopWatch(
                self.model.tokenizer, request.params.stop, request.params.skip_special_tokens
            )
        self._measure()
        self._phase([request])

    def abort(self, rid: str, message: str) -> int:
        """Ends the request with exactly this id; returns how many were ended (0 or 1)."""
        request = self.scheduler.abort(rid, message)
        self._ended([request] if request is not None else [])
        return int(request is not None)

    def abort_all(self, message: str) -> int:
        ended = self.scheduler.abort_all(message)
        self._ended(ended)
        return len(ended)

    def pause(self, mode: str) -> int:
        """Stops planning steps. abort ends all requests, retract drops the KV of running ones, in_place keeps
        all. Requests that come during a pause wait. Returns how many requests are held or were ended."""
        self.scheduler.paused = True
        self.metrics.paused()
        if mode == "abort":
            return self.abort_all("paused with mode abort")
        if mode == "retract":
            self.scheduler.retract_all()
        self._measure()
        return len(self.scheduler.running) + len(self.scheduler.waiting)

    def resume(self) -> None:
        self.scheduler.paused = False
        self.metrics.resumed()

    def idle(self) -> bool:
        scheduler = self.scheduler
        return not scheduler.running and not scheduler.waiting and not scheduler.parked

    def flush_cache(self) -> bool:
        """Frees all cached pages; False, with nothing done, while requests run or wait."""
        if self.idle():
            self.scheduler.flush_cache()
        return self.idle()

    def rename(self, label: str) -> None:
        """Gives the weights that are loaded another label; tokens from here on carry it."""
        self.attested = replace(self.attested, version=label)
        self._end_unmet()

    def activate(self, activation: Activation) -> Activated:
        """Puts staged weights into place. Raises WeightError, with nothing changed, where another update came
        between, or where memory is released or stale and this is no full update of it; WeightsUnknown, with the
        engine fenced, where something else was written than staged."""
        began = time.monotonic()
        if WEIGHTS in self.memory.released:
            raise WeightError("the weights' memory is released; resume it before an update")
        if self.memory.stale is not None and not activation.staged.full:
            raise WeightError(f"{self.memory.stale}, and this update leaves tensors out")
        try:
            root = self.weights.activate(activation.staged)  # first: it may refuse
        except WeightsUnknown as fault:
            self.fence(str(fault))
            raise
        met = len(self.scheduler.running) + len(self.scheduler.waiting)
        if activation.abort_all:
            self.abort_all("aborted by a weight update")
        elif activation.flush:
            self.scheduler.retract_all()
            self._ended(self.scheduler.abort_held("the weights changed before its KV was read"))
        self.scheduler.forget_cache()
        self.memory.stale = None
        verified = "full" if activation.staged.full else "incremental"
        self.attested = Attested(activation.label, root, time.time(), verified=verified)
        self._end_unmet()
        pause_s = time.monotonic() - began
        self.metrics.updated(pause_s)
        return Activated(self.attested, met, pause_s)

    def keep(self, label: str) -> Activated:
        """An update that changes nothing: the weights are there already, so only their label may change."""
        if self.fenced is not None:
            raise WeightError(f"{self.fenced}, so nothing can be kept")
        if label != self.attested.version:
            self.rename(label)
        return Activated(self.attested, len(self.scheduler.running) + len(self.scheduler.waiting), 0.0)

    def fence(self, reason: str) -> None:
        """The weights are not what was attested: everything under way ends without another token, and nothing is
        served until a full update."""
        self.memory.stale = f"unknown weights: {reason}"
        self.weights.forget()
        self.attested = Attested("unknown", "", time.time(), verified="not")
        self.abort_all(self.memory.stale)
        self.scheduler.forget_cache()

    def audited(self, generation: int) -> None:
        """All live tensors were read and are as attested, where nothing was changed since `generation`."""
        if generation == self.weights.generation and self.fenced is None:
            self.attested = replace(self.attested, at=time.time(), verified="full")

    def release_memory(self, tags: Sequence[str]) -> Released:
        """Gives memory back; raises UserError for an unknown tag, or while requests run or wait."""
        self._need_idle("release_memory_occupation")
        self.scheduler.flush_cache()
        return self.memory.release(tags)

    def spoil(self, noise: Staged) -> None:
        """Puts noise in place of the weights, which are stale from then on; only while nothing runs or waits."""
        self._need_idle("reset_tensors")
        self.scheduler.flush_cache()
        self.weights.activate(noise)
        self.memory.stale = "tensors were reset, so a full update is needed"

    def step(self) -> bool:
        """Runs one step; False where there is nothing to do."""
        chunks = self.scheduler.plan()
        self._phase(self.scheduler.reserved)
        self.scheduler.reserved.clear()
        if not chunks:
            return False
        sampling = [chunk.request for chunk in chunks if chunk.samples]
        sampled = self.runner.run(self._steps.build(chunks, [_draw(request) for request in sampling]))
        self.runner.routed.note(chunks)
        scores = iter(sampled.scores)
        ended = [
            chunk.request
            for chunk in chunks
            if self._computed(chunk, list(islice(scores, len(chunk.scores))))
        ]
        for request, token, logprob in zip(sampling, sampled.tokens, sampled.logprobs):
            if request.finish is None and self._accept(request, token, logprob):
                ended.append(request)
        self.metrics.stepped(sampling)
        self._measure(chunks, len(sampling))
        self._ended(ended)
        return True

    def check(self) -> None:
        """Raises InvariantBroken where a page, slot, token or request is lost."""
        self.scheduler.check()

    def _need_idle(self, what: str) -> None:
        if not self.idle():
            held = f"{len(self.scheduler.running)} requests run and {len(self.scheduler.waiting)} wait"
            raise UserError(Fault(what, "", held, "abort them, or wait for their end"))

    def _end_unmet(self) -> None:
        """Ends the requests, waiting or running, whose constraint the weights that are served now do not meet:
        not one token of theirs may come from these."""
        served = self.attested.version
        for request in [*self.scheduler.running, *self.scheduler.waiting, *self.scheduler.parked]:
            if request.constraint is not None and not request.constraint.met_by(served):
                self.abort(request.rid, f"asked for {request.constraint}; {served} is served now")

    def offer(self, rid: str) -> None:
        """The prompt of a PENDING request was computed elsewhere: it may take pages now."""
        self.scheduler.offer(rid)
        self._measure()

    def accept_first(self, request: Request, token: int, logprob: float) -> None:
        """The KV of a RECEIVING request lies in its pages, with this first token from the same weights."""
        self.scheduler.attach(request)
        ended = self._accept(request, token, logprob)
        self.metrics.stepped([request])
        self._measure(tokens=1)
        self._ended([request] if ended else [])

    def release(self, request: Request, finish: Finish) -> None:
        """The KV of a HELD request was taken: it ends."""
        self.scheduler.finish(request, finish)
        self._ended([request])

    def _computed(self, chunk: Chunk, scores: list[float]) -> bool:
        """Takes a chunk's result over; returns whether the request ended."""
        wrong = [score for score in scores if not math.isfinite(score)]
        if wrong:
            self.scheduler.abort(chunk.request.rid, f"log-prob {wrong[0]} in the prompt")
            return True
        return self.scheduler.computed(chunk, scores)

    def _accept(self, request: Request, token: int, logprob: float) -> bool:
        """Takes one token over; returns whether the request ended."""
        if not math.isfinite(logprob):
            self.scheduler.abort(request.rid, f"log-prob {logprob} at token {request.generated}")
            return True
        if self.scheduler.accept(request, token, logprob, self.attested.version):
            return True
        watch = self._watches.get(request.rid)
        stopped = watch is not None and watch.push([token])
        if request.hold:
            request.ends = stopped or token in request.end_ids
            request.made_by = self.attested.root
            self.scheduler.hold(request)
            self._phase([request])
        elif stopped:
            self.scheduler.finish(request, Finish.STOP)
        return stopped and not request.hold

    def _ended(self, requests: list[Request]) -> None:
        if requests:
            self._measure()  # first: who hears of an end may ask for the load next
        for request in requests:
            self._watches.pop(request.rid, None)
            self.metrics.ended(request)
            self._on_end(request)
        self._phase(requests)

    def _phase(self, requests: list[Request]) -> None:
        for request in requests:
            if request.bootstrap is not None:
                self.on_phase(request)

    def _measure(self, chunks: tuple[Chunk, ...] = (), tokens: int = 0) -> None:
        scheduler = self.scheduler
        self.load = Load(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(scheduler.parked),
            used_pages=scheduler.limits.pages - scheduler.pages.available,
            steps=self.load.steps + bool(chunks),
            tokens=self.load.tokens + tokens,
            preempted=scheduler.preemptions,
            prompt_rows=self.load.prompt_rows + sum(_prompt_rows(chunk) for chunk in chunks),
        )


def _nobody(request: Request) -> None:
    """Nobody serves split requests."""


def _prompt_rows(chunk: Chunk) -> int:
    return max(0, min(chunk.request.prompt_tokens, chunk.first + chunk.count) - chunk.first)


def _draw(request: Request) -> Draw:
    early = request.generated < request.params.min_new_tokens
    banned = tuple(request.end_ids) if early else ()
    return Draw(request.params, request.seed, len(request.tokens), banned)
