"""Bugs planted into the scheduler and the prefix cache, each by one wrong method, and how soon random schedules
(tests.engine_schedules) show them.

`python -m tests.engine_bugs --schedules 10000 --json FILE` runs that many without a bug, then looks for each bug; a
failure names its seed. `make soak` does so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tests.engine_schedules import PAGE, PAIRS, Broken, coverage, run_schedule
from turnout.core.errors import TurnoutError
from turnout.engine.page_pool import PagePool
from turnout.engine.pages import PageAllocator
from turnout.engine.radix import Node, RadixCache
from turnout.engine.request_machine import Event, Request, State
from turnout.engine.scheduler_machine import Scheduler


def _page_twice(real: Callable[..., None]) -> Callable[..., None]:
    def give(self: PageAllocator, pages: list[int]) -> None:
        real(self, pages)
        self._free.extend(pages[:1])

    return give


def _epoch_goes_on(_real: Callable[..., None]) -> Callable[..., None]:
    return lambda self: None


def _slot_lost_by_abort(real: Callable[..., None]) -> Callable[..., None]:
    def leave(self: Scheduler, request: Request, event: Event) -> None:
        real(self, request, event)
        if event is Event.ABORT and self._slots:
            self._slots.pop()

    return leave


def _token_lost_by_preemption(real: Callable[..., None]) -> Callable[..., None]:
    def preempt(self: Scheduler, request: Request) -> None:
        real(self, request)
        if request.generated:
            request.tokens.pop()
            request.logprobs.pop()
            count, label = request.runs.pop()
            request.runs.extend([(count - 1, label)] if count > 1 else [])

    return preempt


def _shared_before_computed(real: Callable[..., None]) -> Callable[..., None]:
    def share(self: PagePool, request: Request) -> None:
        computed = request.computed
        request.computed = min(-(-computed // PAGE) * PAGE, len(request.tokens))
        real(self, request)
        request.computed = computed

    return share


def _pinned_page_evicted(real: Callable[..., None]) -> Callable[..., None]:
    def pin(self: RadixCache, child: Node) -> None:
        real(self, child)
        child.refs -= 1
        self.evictable += child.refs == 0
        self._offer(child)

    return pin


def _namespace_ignored(_real: Callable[..., None]) -> Callable[..., None]:
    def open_path(self: PagePool, request: Request) -> None:
        request.node, request.seen = self._cache.pin_root(""), (None, 0)

    return open_path


def _score_after_preemption_again(_real: Callable[..., None]) -> property:
    return property(lambda self: None if self.logprob_start is None else self.logprob_start)


BUGS: dict[str, tuple[type, str, Callable[[Any], Any]]] = {
    "a page is returned twice": (PageAllocator, "give", _page_twice),
    "an update does not end the epoch": (Scheduler, "forget_cache", _epoch_goes_on),
    "abort leaves a slot": (Scheduler, "_leave", _slot_lost_by_abort),
    "preemption drops a token": (Scheduler, "_preempt", _token_lost_by_preemption),
    "a page is shared before it was computed": (PagePool, "share", _shared_before_computed),
    "a pinned page is evicted": (RadixCache, "pin", _pinned_page_evicted),
    "namespaces are ignored": (PagePool, "open", _namespace_ignored),
    "prompt positions are scored again": (Request, "unscored", _score_after_preemption_again),
}


def find_bug(name: str, first_seed: int, limit: int, books: bool = True) -> tuple[int, str] | None:
    """After how many schedules a planted bug shows, and how; None where `limit` schedules do not show it. Without
    `books` the engine's own check is off, and only what tokens and pages hold can show it."""
    owner, method, wrong = BUGS[name]
    checks = contextlib.nullcontext() if books else mock.patch.object(Scheduler, "check", lambda self: None)
    with mock.patch.object(owner, method, wrong(getattr(owner, method))), checks:
        for count in range(1, limit + 1):
            try:
                run_schedule(first_seed + count - 1, Counter())
            except (Broken, TurnoutError, IndexError, StopIteration, KeyError) as fault:
                return count, f"{type(fault).__name__}: {fault}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    seen: Counter[tuple[State, Event, bool]] = Counter()
    began, totals = time.monotonic(), Counter[str]()
    for seed in range(asked.seed, asked.seed + asked.schedules):
        try:
            world = run_schedule(seed, seen)
        except (Broken, TurnoutError) as fault:
            raise SystemExit(f"seed {seed}: {fault}") from fault
        totals.update(
            steps=world.steps,
            requests=len(world.requests),
            tokens=sum(r.generated for r in world.requests),
            cached_tokens=sum(r.cached for r in world.requests),
            preemptions=world.core.scheduler.preemptions,
            updates=world.epoch,
        )
    pairs = coverage(seen)
    missing = [pair for kind in pairs.values() for pair, count in kind.items() if not count]
    bugs = {name: find_bug(name, asked.seed, asked.schedules) for name in BUGS}
    asked.json.write_text(
        json.dumps(
            {
                "schedules": asked.schedules,
                "first_seed": asked.seed,
                **totals,
                "failed": 0,
                "pairs": len(PAIRS),
                "pairs_not_covered": missing,
                "coverage": pairs,
                "planted_bugs": {
                    name: None if found is None else {"schedules": found[0], "shown_by": found[1]}
                    for name, found in bugs.items()
                },
                "seconds": round(time.monotonic() - began, 1),
            },
            indent=1,
        )
        + "\n"
    )
    print(f"{asked.schedules} schedules, {totals['steps']} steps, not covered: {missing}, bugs: {bugs}")
    if missing or None in bugs.values():
        raise SystemExit("a pair was not covered or a planted bug was not found")


if __name__ == "__main__":
    main()
