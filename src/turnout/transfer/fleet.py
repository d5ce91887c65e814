"""The engines of a run: what each is known to hold, and which of them may be asked.

Owns every engine's `holds`. Promises: an engine holds a version only after it attested it and the version was
committed; a fenced engine holds nothing and takes no request; one that is gone, or failed in `TRIES_MAX` updates in
a row, is asked in no further one until it joins anew; a decode engine may be asked only while a prefill engine
serves the very version that it serves. Engines that `follow` come to versions by themselves (followers beside
them): what they hold is what they proved last, and no failure leaves them out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Collection, Sequence

from turnout.core.errors import WeightError
from turnout.core.events import EngineFenced
from turnout.core.ports import EventSink
from turnout.core.version import VersionConstraint, label_counter
from turnout.serving.client import EngineClient
from turnout.serving.roster import EnginePlan, WorkerType, sides
from turnout.weights.quorum import Sides, lacking
from turnout.weights.routing import Held, Standing, routable

log = logging.getLogger(__name__)
TRIES_MAX = 3
PROVED_KEPT = 16  # versions that requests in flight can have tokens of, and more


class Fleet:
    """See the module. `current` is the newest committed version."""

    def __init__(
        self, engines: Sequence[EngineClient], events: EventSink, min_engines: int | None, max_engine_lag: int
    ) -> None:
        """`min_engines`: how many an update needs, None: all of these."""
        self.engines = {engine.engine_id: engine for engine in engines}
        self.min_engines = len(engines) if min_engines is None else min_engines
        self.max_engine_lag = max_engine_lag
        self._current: Held | None = None
        self._routable: list[EngineClient] | None = None  # without a minimum; None: to be found anew
        self._prefills: dict[Held, list[EngineClient]] | None = None  # as _routable
        self._answering: tuple[EnginePlan, ...] | None = None
        self._next = asyncio.Event()
        self._events = events
        self.follow = False
        self.open: dict[str, Held] = {}  # versions that engines which follow may hold, by label
        self.lives = Counter[str]()  # by engine, how often all that was known of it became void
        self._failures = Counter[str]()
        self._apart: set[str] = set()
        self._gone: set[str] = set()
        self._tentative: set[str] = set()
        self._asleep: set[str] = set()
        self._proved: dict[str, deque[str]] = {}  # by engine, its newest committed labels

    @property
    def current(self) -> Held | None:
        return self._current

    @current.setter
    def current(self, held: Held) -> None:
        self._current = held
        self._change()

    async def changed(self) -> None:
        """Waits until engines may have become routable, or versions committed or void. Look first, then wait."""
        await self._next.wait()

    def _change(self) -> None:
        """Whoever waits looks again; one wake-up, however much changes before they can."""
        self._routable = self._prefills = self._answering = None
        before, self._next = self._next, asyncio.Event()
        before.set()

    @property
    def fenced(self) -> set[str]:
        """Engines of unknown or tentative weights."""
        return {name for name, engine in self.engines.items() if engine.holds is None}

    @property
    def present(self) -> dict[str, EngineClient]:
        """All that are not gone."""
        return {name: engine for name, engine in self.engines.items() if name not in self._gone}

    def required(self) -> tuple[str, ...]:
        """The engines that take part in the next update; fenced ones too, which it heals."""
        out = self._apart | self._gone
        return tuple(name for name in self.engines if name not in out and not self.unasked(name))

    @property
    def sides(self) -> Sides:
        """The halves of the PD pairs, of each of which an update needs one engine."""
        return sides(engine.plan for engine in self.engines.values())

    def answering(self) -> tuple[EnginePlan, ...]:
        """The engines that answer requests: all but those that compute prompts for others. The same object until
        one comes or changes."""
        if self._answering is None:
            plans = (engine.plan for engine in self.engines.values())
            self._answering = tuple(plan for plan in plans if plan.worker_type is not WorkerType.PREFILL)
        return self._answering

    def enough(self, names: Collection[str]) -> bool:
        """Whether an update can be committed with these engines."""
        return not lacking(names, self.min_engines, self.sides)

    def unasked(self, engine_id: str) -> str:
        """Why an engine has no part in updates until it joins anew; empty where it has one."""
        failed = self._failures[engine_id]
        return f"it failed in {failed} weight updates in a row" if failed >= TRIES_MAX else ""

    def changing(self, engine_id: str) -> bool:
        """Whether its weights are being put into place."""
        return not self.follow and (engine_id in self._tentative or engine_id in self._apart)

    def add(self, engine: EngineClient) -> None:
        """A new engine, or one that started again: nothing is known of it, its failures are forgotten."""
        self._change()
        self.engines[engine.engine_id] = engine
        self.lives[engine.engine_id] += 1
        engine.holds = None
        self._failures.pop(engine.engine_id, None)
        self._gone.discard(engine.engine_id)
        self._asleep.discard(engine.engine_id)

    def lost(self, engine_id: str, reason: str) -> None:
        """The engine is gone: fenced, and without a part in updates, until it joins anew."""
        self._gone.add(engine_id)
        self.lives[engine_id] += 1  # also of one that is fenced and about to join
        if engine_id not in self.fenced:
            self.fence(engine_id, "", reason)

    def remove(self, engine_id: str) -> None:
        """There is no such engine any more. What it proved stays known: requests may hold tokens of it."""
        self._change()
        self.engines.pop(engine_id, None)
        for names in (self._gone, self._apart, self._tentative, self._asleep):
            names.discard(engine_id)
        self._failures.pop(engine_id, None)

    def set_apart(self, engine_id: str, apart: bool) -> None:
        """An engine that loads on its own has no part in updates until it has."""
        (self._apart.add if apart else self._apart.discard)(engine_id)

    def rest(self, engine_id: str) -> None:
        """The engine gives its memory back: it takes no request until it holds what is committed next."""
        self._change()
        self._asleep.add(engine_id)

    def activate(self, engine_id: str) -> None:
        """The engine is told to change its weights: it takes no request until that is committed."""
        self._change()
        self._tentative.add(engine_id)

    def fence(self, engine_id: str, label: str, reason: str) -> None:
        """No request goes to the engine until it holds a committed version again; `label` names the version that
        it failed to take (empty: none)."""
        self._change()
        self.engines[engine_id].holds = None
        self.lives[engine_id] += 1
        self._tentative.discard(engine_id)
        self._failures[engine_id] += not self.follow
        self._events.emit(EngineFenced(engine_id, label, reason))
        log.warning("engine %s is fenced: %s", engine_id, reason)
        if self._failures[engine_id] == TRIES_MAX:
            log.warning(
                "engine %s failed %d times in a row and is left out from now on", engine_id, TRIES_MAX
            )

    def hold(self, engine_id: str, held: Held) -> None:
        """The engine attested a version that is committed."""
        self._proved.setdefault(engine_id, deque(maxlen=PROVED_KEPT)).append(held.version.label)
        self._change()
        self.engines[engine_id].holds = held
        self._tentative.discard(engine_id)
        self._asleep.discard(engine_id)
        self._failures.pop(engine_id, None)

    def standing(self, label: str, engine_id: str) -> Standing:
        """What became of the version of this label, as this engine told it of its tokens: COMMITTED only where the
        engine has proved it, since one that loaded something else has the same label. A text that is no label of
        ours names nothing that could be known; the lag gate refuses its tokens."""
        if label in self._proved.get(engine_id, ()) or label_counter(label) is None:
            return Standing.COMMITTED
        if engine_id in self._tentative or (self.follow and self._comes(engine_id, label)):
            return Standing.TENTATIVE
        return Standing.VOID

    def _comes(self, engine_id: str, label: str) -> bool:
        """Whether an engine that follows may have gone on to this version, and has not been asked since."""
        engine, held = self.engines.get(engine_id), self.open.get(label)
        if held is None or engine is None or engine.holds is None:
            return False
        return held.version.counter > engine.holds.version.counter

    def holding(self) -> list[EngineClient]:
        """The engines of whatever part that serve now, or will again once the update under way has ended: of
        committed versions that may serve."""
        now, lag = self._current, self.max_engine_lag
        return [] if now is None else [e for e in self.engines.values() if routable(e.holds, None, now, lag)]

    def any_routable(self) -> bool:
        try:
            return bool(self.routable())
        except WeightError:
            return False

    def routable(self, minimum: VersionConstraint | None = None) -> list[EngineClient]:
        """The engines that a request may go to, in a fixed order; raises WeightError where there is none."""
        assert self.current is not None, "a base version is adopted before anything is routed"
        if minimum is None and self._routable is not None:
            return self._routable
        out = self._tentative | self._asleep
        found = [
            engine
            for name, engine in self.engines.items()
            if name not in out
            and routable(engine.holds, minimum, self.current, self.max_engine_lag)
            and engine.plan.worker_type is not WorkerType.PREFILL
            and (engine.plan.worker_type is not WorkerType.DECODE or self.prefills(engine))
        ]
        if not found:
            fenced = ", ".join(sorted(self.fenced))
            raise WeightError(
                f"no engine may serve {minimum or self.current.version.label}; fenced: {fenced or 'none'}"
            )
        if minimum is None:
            self._routable = found
        return found

    def prefills(self, engine: EngineClient) -> Sequence[EngineClient]:
        """The engines that may compute a prompt for this one: prefill engines of the version that it serves. None
        for an engine that does that itself."""
        if engine.holds is None or engine.plan.worker_type is not WorkerType.DECODE:
            return ()
        if self._prefills is None:
            self._prefills = {}
            for name, one in self.engines.items():
                resting = name in self._tentative or name in self._asleep
                if one.plan.worker_type is WorkerType.PREFILL and one.holds and not resting:
                    self._prefills.setdefault(one.holds, []).append(one)
        return self._prefills.get(engine.holds, ())
