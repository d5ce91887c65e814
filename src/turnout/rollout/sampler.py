"""One sample, whatever happens to the engines that make it.

Streams it, journals it, and sends prompt and tokens so far to any engine that may be asked when a request ends
early: by an abort that nobody here asked for, by the death of its engine, by weights that never became current.
Promises: tokens that were received are never made again; the seed stays, and an engine's noise is a function of
seed and position, so what follows is what would have followed; the budget is that of the sample, bounded by the
context, and where none is left the sample ends by LENGTH without a request; an abort is never read as an end. A
sample ends at its deadline, and after TRIES_MAX requests in a row that brought no token; engines that were fenced
meanwhile do not count, however many of them die under one sample.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnout.core.errors import DeadlineExceeded, EngineBusy, EngineDead, VersionUnmet, WeightError
from turnout.core.ports import Clock
from turnout.core.record import record
from turnout.core.rng import IdSource, random_id
from turnout.core.types import Finish, Prompt, Trajectory, but
from turnout.core.waits import ENGINES, PLACES, UPDATE, Wait, Waiting, unregistered
from turnout.protocol.sglang import GenerateReply, GenerateRequest, SamplingParams
from turnout.rollout.cut import Cut
from turnout.rollout.draft import Desk, Draft, Journal, Pace
from turnout.rollout.line import Line
from turnout.rollout.spread import Spread, endless
from turnout.rollout.stops import Decoder, ended, stopped_at
from turnout.serving.client import EngineClient
from turnout.serving.pair import Way
from turnout.weights.routing import Standing

BUSY_PAUSE_S = 0.2
MOVED_S = 1.0
GONE_S = 2.0
TRIES_MAX = 3


@dataclass(frozen=True)
class SamplingPlan:
    """How a prompt is sampled. `deadline_s` bounds one sample from sending to answer; `min_group` is the smallest
    group that may train when members fail (the size itself: all or nothing). `context`: longest prompt and response
    together (None: the engine's own limit). `mask_offpolicy`: what another version made before a resume does not
    train; `mask_kv_mixed`: nor what was made on KV of older weights. `version`: the label of the only weights that
    may answer (empty: those that the engine has, or newer ones). `routed`: experts of a mixture are kept."""

    samples: int
    params: SamplingParams
    deadline_s: float
    min_group: int
    context: int | None = None
    mask_offpolicy: bool = False
    mask_kv_mixed: bool = False
    version: str = ""
    routed: bool = False

    def left(self, prompt: int, made: int) -> int:
        """How many tokens a response may still get."""
        left = self.params.max_new_tokens - made
        return left if self.context is None else min(left, self.context - prompt - made)


def _committed(_label: str, _engine_id: str) -> Standing:
    return Standing.COMMITTED


async def _unchanging() -> None:
    await asyncio.Event().wait()


def _whole(_engine: EngineClient) -> Sequence[EngineClient]:
    """Engines that compute their prompts themselves."""
    return ()


@dataclass(frozen=True)
class Routes:
    """`routable`: the engines that may be asked now, in a fixed order; raises WeightError where there is none.
    `prefills`: those that compute the prompt for one of these, with the same weights (none: it does that itself).
    `standing`: what became of the version of a label that this engine named. `changed` waits until either may give
    another answer. `room`: how many requests all engines together may have been sent; more wait here, those of
    older groups first (turnout.rollout.line)."""

    routable: Callable[[], Sequence[EngineClient]]
    standing: Callable[[str, str], Standing] = _committed
    changed: Callable[[], Awaitable[None]] = _unchanging
    room: Callable[[], float] = endless
    prefills: Callable[[EngineClient], Sequence[EngineClient]] = _whole


Work = Callable[["Ask", Draft, Wait], Coroutine[Any, Any, Finish]]


def _nobody(_draft: Draft) -> None:
    """No journal is kept."""


@record
class Ask:
    """One sample: what exists of it (its seed is there), whose turn it is (its group's ordinal, by which
    it gets an engine and a place), who keeps its tokens, what cuts it, where its waits are registered, and the name
    under which several turns of it find the engine that has their prefix (empty: it has one turn)."""

    prompt: Prompt
    plan: SamplingPlan
    begun: Trajectory
    turn: int
    journal: Journal = _nobody
    cut: Cut = field(default_factory=Cut)
    waits: Waiting = unregistered
    session: str = ""


class Sampler:
    """See the module. `tokens_made` and `resumes` (requests that began with tokens) only grow."""

    def __init__(
        self,
        routes: Routes,
        decoder: Decoder,
        clock: Clock,
        ids: IdSource = random_id,
        pace: Pace | None = None,
    ) -> None:
        self._routes, self.decoder, self._clock, self._ids = routes, decoder, clock, ids
        self._desk = Desk(routes.standing, clock, Pace() if pace is None else pace)
        self._line = Line(routes.room)
        self._spread, self._prompts = Spread(routes.room), Spread(routes.room)
        self.tokens_made = 0
        self.resumes = 0
        self._later = (0, 0)

    @property
    def clock(self) -> Clock:
        return self._clock

    def sample(self, ask: Ask) -> Coroutine[Any, Any, Trajectory]:
        """The unscored trajectory: ended, or partial where it was cut or its engines gave it up. Raises
        EngineError; EngineDead where an engine is gone and nobody fences it."""
        return self.made(ask, self.turn)

    async def made(self, ask: Ask, work: Work) -> Trajectory:
        """What `work` makes of the sample's draft; as `sample`."""
        draft = Draft(ask.begun, self._desk, ask.journal, ask.plan.mask_kv_mixed)
        with ask.waits(ENGINES, "an engine", ask.plan.deadline_s) as wait:
            finish = None if ask.cut.made else await ask.cut.under(work(ask, draft, wait))
        if finish is None or finish is Finish.ABORT:
            draft.drop_unsure()
            return draft.trajectory(Finish.ABORT, "")
        said = draft.ids[draft.opening :]
        return draft.trajectory(finish, self.decoder.decode(said, skip_special_tokens=True))

    def later_turns(self) -> tuple[int, int]:
        """Prompt tokens of turns after a sample's first, so far, and how many of them a prefix cache had."""
        return self._later

    def forget(self, session: str) -> None:
        """The sample of this name has ended."""
        self._spread.forget(session)
        self._prompts.forget(session)

    async def turn(self, ask: Ask, draft: Draft, wait: Wait) -> Finish:
        """Asks engines until the turn that begins at `draft.turn` has ended; ABORT after too many requests that
        brought nothing. `wait` says what for, and moves with every token."""
        end = self._clock.now() + ask.plan.deadline_s
        if ask.plan.mask_offpolicy and draft.ids and self._over(ask, draft) is None:
            draft.mask_old((await self._way(ask, None, wait, end)).engine.version)
        way: Way | None = None
        barren = 0
        while True:
            over = self._over(ask, draft)
            if over is not None:
                made = len(draft.ids)
                finish = await self._ended(over, draft, end)
                if finish is not Finish.ABORT or len(draft.ids) == made:
                    return finish  # else some were void: on from the rest
            before, stays = len(draft.ids), True
            try:
                way, finish, fault = await self._tried(ask, draft, way, wait, end)
                if isinstance(fault, VersionUnmet):
                    if ask.plan.version or self._clock.now() + BUSY_PAUSE_S >= end:
                        raise fault
                    await self._clock.sleep(BUSY_PAUSE_S)
                    continue
                if fault is not None:
                    stays = not await self._fenced(way, fault.engine_id, end)
            finally:
                draft.report()
                made = len(draft.ids) - before
                self.resumes += before > 0
                self.tokens_made += max(0, made)
            if finish is not Finish.ABORT:
                return finish
            barren = 0 if made > 0 else barren + stays
            if made > 0:
                way = Way(way.engine)  # the prompt's engine did its part, and may again
            late = not stays and self._clock.now() >= end
            if barren == TRIES_MAX or late:
                if fault is not None:
                    raise fault
                return finish

    async def _tried(
        self, ask: Ask, draft: Draft, last: Way | None, wait: Wait, end: float
    ) -> tuple[Way, Finish, EngineDead | VersionUnmet | None]:
        """One request in its turn and on a place of its engines, after one that `last` was asked; ABORT where an
        engine of it died, or has other weights than the request may be answered with."""
        wait.on, wait.what = PLACES, "room"
        if not self._line.enters():
            await self._queued(ask, wait, end)
        try:
            way = await self._way(ask, last, wait, end)
            engine, first = way.engine.engine_id, None if way.first is None else way.first.engine_id
            wait.on, wait.what = f"engine {first or engine}", "a token"
            self._spread.begin(ask.turn, engine, ask.session)
            if first is not None:
                self._prompts.begin(ask.turn, first, ask.session)
            try:
                return way, await self._asked(way, ask, draft, wait, end), None
            except (EngineDead, VersionUnmet) as fault:
                return way, Finish.ABORT, fault
            finally:
                self._spread.end(ask.turn, engine)
                if first is not None:
                    self._prompts.end(ask.turn, first)
        finally:
            self._line.leave()

    async def _queued(self, ask: Ask, wait: Wait, end: float) -> None:
        """Waits for a place on the engines."""
        began = self._clock.now()
        try:
            await self._line.enter(ask.turn, self._clock, end)
        except DeadlineExceeded as late:
            raise EngineBusy("none", "rollout", "none", str(late)) from late
        if self._clock.now() - began > MOVED_S:  # its turn has come: not so where it is only sent again
            wait.since = self._clock.now()

    async def _way(self, ask: Ask, last: Way | None, wait: Wait, end: float) -> Way:
        """Who answers the next request after one that `last` was asked, waited for while an update leaves none to
        be asked. For a sample of one version only there is nothing to wait for: raises VersionUnmet."""
        while True:
            try:
                engines = self._routes.routable()
                before = None if last is None else last.engine
                engine = self._spread.choose(ask.turn, engines, before, ask.session)
                firsts = self._routes.prefills(engine)
                if not firsts:
                    return Way(engine)
                before = None if last is None else last.first
                return Way(engine, self._prompts.choose(ask.turn, firsts, before, ask.session))
            except WeightError as fault:
                if ask.plan.version:
                    raise VersionUnmet("none", "none", "", str(fault)) from fault
                wait.on, wait.what = ENGINES, str(fault)
                if not await self._changed(end):
                    raise EngineBusy("none", "rollout", "none", str(fault)) from fault

    async def _changed(self, end: float) -> bool:
        """Waits for news of the engines; False where none comes before `end`."""
        left = end - self._clock.now()
        if left <= 0:
            return False
        try:
            await self._clock.within(left, "news of the engines", self._routes.changed())
        except DeadlineExceeded:
            return False
        return True

    async def _asked(self, way: Way, ask: Ask, draft: Draft, wait: Wait, end: float) -> Finish:
        """One request for what is missing; tried again while the engine is busy, as a new one."""
        plan, made = ask.plan, len(draft.ids)
        params = but(
            plan.params,
            max_new_tokens=plan.left(len(ask.prompt.token_ids), made),
            min_new_tokens=max(0, plan.params.min_new_tokens - made),
            sampling_seed=draft.seed,
            stream_interval=self._desk.pace.tokens,
        )
        ids = ask.prompt.token_ids + tuple(draft.ids)
        key = f"{plan.version}!" if plan.version else way.engine.version
        routing = ask.session or str(ask.turn)
        start = (len(ids) - 1 if draft.prompt_routed else 0) if plan.routed else None
        while True:
            request = GenerateRequest(
                self._ids(), ids, params, extra_key=key, routing_key=routing, routed_from=start
            )
            try:
                return await self._streamed(way, request, draft, wait, end)
            except EngineBusy:
                if len(draft.ids) != made:  # the request asks for what came once more
                    return Finish.ABORT
                if self._clock.now() + BUSY_PAUSE_S >= end:
                    raise
                wait.what = "a token: it says that it is busy"
                await self._clock.sleep(BUSY_PAUSE_S)

    async def _streamed(
        self, way: Way, request: GenerateRequest, draft: Draft, wait: Wait, end: float
    ) -> Finish:
        """Takes over what one request makes; how the response ended, ABORT where it did not."""
        seam, stops, now, stopped = len(draft.ids), request.params.stop, self._clock.now, False
        stream = way.stream(request, max(0.001, end - now()), self._room)
        try:
            async for item in stream:
                wait.since = now()
                if isinstance(item, GenerateReply):
                    if draft.turn > draft.opening and draft.turn == seam:
                        prompts, cached = self._later
                        self._later = prompts + item.prompt_tokens, cached + item.cached_tokens
                    wait.on, wait.what = UPDATE, "its version to be committed"
                    if request.routed_from is not None:
                        draft.routed(item, request.routed_from, len(request.input_ids) - seam)
                    return await self._ended(Finish.STOP if stopped else item.finish, draft, end)
                if stopped:  # the engine does not see where it stops: there is no record then
                    return await self._ended(Finish.STOP, draft, end)
                since = len(draft.ids)
                if way.first is None or since > seam:
                    stays = draft.extend(item)
                else:
                    wait.on = f"engine {way.engine.engine_id}"
                    stays = all(map(draft.extend, way.begun(item)))
                if not stays:
                    return Finish.ABORT
                if stops and (stop := self._stopped(stops, draft, seam, since)) is not None:
                    draft.end_at(stop)
                    stopped = True
                    if request.routed_from is None:
                        return await self._ended(Finish.STOP, draft, end)
                draft.report_due(wait.since)
        finally:
            await stream.aclose()
        raise AssertionError("a stream ends with a reply or an error")

    def _over(self, ask: Ask, draft: Draft) -> Finish | None:
        """How the turn has ended by the tokens that exist; None where it goes on."""
        params, ids = ask.plan.params, draft.ids
        if len(ids) > draft.turn:
            if ended(self.decoder, params, ids, draft.turn):
                return Finish.STOP
            if self._stopped(params.stop, draft, len(ids)) is not None:
                return Finish.STOP
        return Finish.LENGTH if ask.plan.left(len(ask.prompt.token_ids), len(ids)) <= 0 else None

    def _stopped(self, stops: Sequence[str], draft: Draft, seam: int, since: int = 0) -> int | None:
        """As stopped_at, of the turn that is being made."""
        start = draft.turn
        if not stops or seam <= start:
            return None
        ids = draft.ids[start:] if start else draft.ids
        found = stopped_at(self.decoder, stops, ids, seam - start, max(0, since - start))
        return None if found is None else start + found

    async def _ended(self, finish: Finish, draft: Draft, end: float) -> Finish:
        """The finish once every token's version is committed; ABORT where one never will be."""
        while (standing := draft.settle()) is Standing.TENTATIVE:
            if not await self._changed(end):
                return Finish.ABORT
        return finish if standing is Standing.COMMITTED else Finish.ABORT

    async def _fenced(self, way: Way, gone: str, end: float) -> bool:
        """Waits a while for an engine that seems gone to be fenced, and says whether it is: who watches it decides,
        not one request."""
        end = min(end, self._clock.now() + GONE_S)

        def asked() -> bool:
            if way.first is not None and way.first.engine_id == gone:
                return way.first in self._routes.prefills(way.engine)
            return way.engine in self._routes.routable()

        with contextlib.suppress(WeightError):  # none is left: it is fenced too
            while asked():
                if not await self._changed(end):
                    return False
        return True

    def _room(self) -> int:
        """The number of a split request, which nobody else has."""
        return int(self._ids()[:16], 16) >> 1
