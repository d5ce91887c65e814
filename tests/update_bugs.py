"""Bugs planted into the weight update, each by one wrong function, and how soon random worlds (tests.update_worlds)
show them.

`python -m tests.update_bugs --worlds 5000 --json FILE` runs that many without a bug, then looks for each bug; a
failure names its seed. `make soak` does so.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from tests.update_worlds import Broken, run_world
from turnout.serving.client import Attestation
from turnout.sim.sabotage_weights import any_root_will_do, fence_is_forgotten, tentative_engines_stay
from turnout.transfer.fleet import Fleet
from turnout.transfer.update import Update
from turnout.transfer.updater import Updater
from turnout.weights import update_machine as machine
from turnout.weights.engine_machine import Engine, Fact
from turnout.weights.update_machine import Abort, Commit, Failed, Fence, Phase, UpdateState

Wrong = Callable[..., Any]
KILLS_MIN = 3
PHASES = ("publishing", "preparing", "activating", "committed", "aborted")


def _first_attestation_commits(real: Wrong) -> Wrong:
    def settled(state: UpdateState) -> Any:
        if state.phase is Phase.ACTIVATING and state.those(Engine.TENTATIVE):
            return replace(state, phase=Phase.COMMITTED), (Commit(state.live),)
        return real(state)

    return settled


def _too_few_are_enough(_real: Wrong) -> Wrong:
    def failed(state: UpdateState, engine: str, reason: str) -> Any:
        moved = machine._moved(state, Fact.FAILED, (engine,))
        ended, effects = machine._settled(moved)
        return ended, (Fence(engine, reason), *effects)

    return failed


def _no_answer_is_a_good_one(real: Wrong) -> Wrong:
    def outcome(self: Update, engine: Any, found: Any, version: Any) -> Any:
        if isinstance(found, Exception):
            found = Attestation(version.label, version.root, "memory")
        return real(self, engine, found, version)

    return outcome


def _engines_that_move_are_asked(_real: Wrong) -> Wrong:
    return lambda self, engine_id: None


def _joiner_is_believed(_real: Wrong) -> Wrong:
    async def caught_up(_self: Updater, _engine: Any, held: Any, _deadline_s: float) -> Attestation:
        return Attestation(held.version.label, held.version.root, "memory")

    return caught_up


def _joiner_holds_what_was_current_before(real: Wrong) -> Wrong:
    """Whatever was committed while it loaded."""

    async def caught_up(self: Updater, engine: Any, held: Any, deadline_s: float) -> Any:
        found = await real(self, engine, held, deadline_s)
        if self.fleet.current is not None:
            self.fleet.hold(engine.engine_id, self.fleet.current)
        return found

    return caught_up


def _death_goes_unnoticed(_real: Wrong) -> Wrong:
    return lambda self, engine_id, reason: None


def _aborted_is_current(real: Wrong) -> Wrong:
    def perform(self: Update, effect: Any) -> None:
        if isinstance(effect, Abort) and self._ready is not None and self._state.those(Engine.FENCED):
            effect = Commit(tuple(self._state.engines))
        real(self, effect)

    return perform


def _failed_prepare_is_ready(real: Wrong) -> Wrong:
    async def prepared(self: Update, ready: Any, engines: Any) -> Any:
        return [
            machine.Prepared(event.engine) if isinstance(event, Failed) and event.engine else event
            for event in await real(self, ready, engines)
        ]

    return prepared


def _fenced_are_left_out(real: Wrong) -> Wrong:
    return lambda self: tuple(name for name in real(self) if name not in self.fenced)


def _loading_engines_take_part(_real: Wrong) -> Wrong:
    return lambda self, engine_id, apart: None


def _joins_cross(_real: Wrong) -> Wrong:
    """What a process that is gone proved counts for the one that came after it."""

    async def joined(self: Updater, engine: Any, _life: int, end: float) -> bool:
        held = self.fleet.current
        assert held is not None
        found = await self._caught_up(engine, held, max(0.001, end - self.clock.now()))
        if found.root == held.version.root and held == self.fleet.current:
            self.fleet.hold(engine.engine_id, held)
            return True
        return False

    return joined


BUGS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "the first attestation commits": (machine, "_settled", _first_attestation_commits),
    "too few engines are enough": (machine, "_failed", _too_few_are_enough),
    "tentative engines are not fenced": (machine, "_aborted", tentative_engines_stay),
    "any root will do": (Update, "_outcome", any_root_will_do),
    "no answer counts as a good one": (Update, "_outcome", _no_answer_is_a_good_one),
    "a fence is forgotten": (Fleet, "fence", fence_is_forgotten),
    "engines are asked while they change": (Fleet, "activate", _engines_that_move_are_asked),
    "a joiner is believed": (Updater, "_caught_up", _joiner_is_believed),
    "a joiner holds what is current when it has loaded": (
        Updater,
        "_caught_up",
        _joiner_holds_what_was_current_before,
    ),
    "an engine's death goes unnoticed": (Updater, "lost", _death_goes_unnoticed),
    "an aborted version becomes current": (Update, "_perform", _aborted_is_current),
    "an engine that could not prepare is activated": (Update, "_prepared", _failed_prepare_is_ready),
    "fenced engines are not healed": (Fleet, "required", _fenced_are_left_out),
    "an engine that loads on its own takes part": (Fleet, "set_apart", _loading_engines_take_part),
    "what a process that is gone proved counts": (Updater, "_joined", _joins_cross),
}


def find_bug(name: str, first_seed: int, limit: int) -> tuple[int, str] | None:
    """After how many worlds a planted bug shows, and how; None where `limit` worlds do not show it."""
    owner, attribute, wrong = BUGS[name]
    with mock.patch.object(owner, attribute, wrong(getattr(owner, attribute))):
        for count in range(1, limit + 1):
            try:
                run_world(first_seed + count - 1)
            except Broken as fault:
                return count, str(fault)[:200]
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    began, totals = time.monotonic(), Counter[str]()
    for seed in range(asked.seed, asked.seed + asked.worlds):
        try:
            totals.update(run_world(seed))
        except Broken as fault:
            raise SystemExit(str(fault)) from fault
    bugs = {name: find_bug(name, asked.seed, asked.worlds) for name in BUGS}
    asked.json.write_text(
        json.dumps(
            {
                "worlds": asked.worlds,
                "first_seed": asked.seed,
                "failed": 0,
                "happened": dict(sorted(totals.items())),
                "planted_bugs": {
                    name: None if found is None else {"worlds": found[0], "shown_by": found[1]}
                    for name, found in bugs.items()
                },
                "seconds": round(time.monotonic() - began, 1),
            },
            indent=1,
        )
        + "\n"
    )
    print(f"{asked.worlds} worlds, {totals['committed']} versions, bugs: {bugs}")
    rare = [
        kill
        for who in ("trainer", "engine")
        for phase in PHASES
        if totals[kill := f"{who} killed while {phase}"] < KILLS_MIN
    ]
    if rare or None in bugs.values():
        raise SystemExit(f"a planted bug was not found, or kills are too rare: {rare}")


if __name__ == "__main__":
    main()
