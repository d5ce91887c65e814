"""Runs checks one after another and looks after the engine between them.

Promises: a check that leaves the engine paused, busy, unhealthy or on other weights is failed for it, and the
engine is put right before the next one; once it can't be put right, every check left is failed with that
reason, at once. No check runs longer than its deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from turnout.bench.compare import difference
from turnout.bench.registry import CapabilityAbsent, Check, Outcome, Result
from turnout.bench.replies import Reply, must
from turnout.bench.report import one_line
from turnout.bench.target import Target
from turnout.core.errors import TurnoutError

CANARY_TOKENS = 5
CANARIES = 3
AFTER_DEADLINE_S = 30.0
SHAPE_FAULTS = (KeyError, IndexError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True)
class Rules:
    """`risky` allows checks that may end a foreign engine; `skip` names those left out, as reported absent."""

    timeout_s: float
    risky: bool
    skip: frozenset[str] = frozenset()


class Suite:
    """Runs checks on one target. `say` is called with each outcome as it comes."""

    def __init__(self, target: Target, rules: Rules, say: Callable[[Outcome], None]) -> None:
        self.target, self.rules, self._say = target, rules, say
        self._canary: list[Reply] = []
        self._lost = ""

    async def run(self, checks: Sequence[Check]) -> tuple[Outcome, ...]:
        self._canary = await self._sing()
        outcomes = []
        for check in checks:
            outcome = await self._one(check)
            self._say(outcome)
            outcomes.append(outcome)
        return tuple(outcomes)

    async def _one(self, check: Check) -> Outcome:
        """One check and the look at the engine after it."""
        if self._lost:
            return Outcome(check.name, check.group, Result.FAILED, f"not run: {self._lost}")
        if check.name in self.rules.skip:
            return Outcome(check.name, check.group, Result.ABSENT, "left out by --skip")
        if check.risky and not (self.target.facts.ours or self.rules.risky):
            detail = f"not tried without --risky: {check.risky}"
            return Outcome(check.name, check.group, Result.ABSENT, detail)
        begun = self.target.clock.now()
        result, detail = await self._try(check)
        left = await self._left_right()
        if left:
            result, detail = (
                Result.FAILED,
                f"afterwards {left}" if result is Result.PASSED else f"{detail}; {left}",
            )
            await self._put_right(check.name)
        outcome = Outcome(check.name, check.group, result, one_line(detail))
        return replace(outcome, seconds=self.target.clock.now() - begun)

    async def _try(self, check: Check) -> tuple[Result, str]:
        what = f"check {check.name} to end"
        try:
            work = check.body(self.target)
            return Result.PASSED, await self.target.clock.within(self.rules.timeout_s, what, work)
        except CapabilityAbsent as fault:
            return Result.ABSENT, str(fault)
        except TurnoutError as fault:
            return Result.FAILED, str(fault)
        except SHAPE_FAULTS as fault:  # an answer of a shape that the check did not know how to read
            return Result.FAILED, f"an answer was not understood: {fault!r}"

    async def _left_right(self) -> str:
        """What is wrong with the engine now; "" where it is idle, healthy and answers as in the beginning."""
        try:
            await self.target.until_idle(AFTER_DEADLINE_S)
            must(await self.target.wire.get("/health_generate"))
            return self._differs(
                await self.target.clock.within(AFTER_DEADLINE_S, "a generation", self._sing())
            )
        except TurnoutError as fault:
            return f"the engine was not left as it was found: {fault}"

    async def _put_right(self, culprit: str) -> None:
        """Continues, aborts, and loads the first weights; remembers why where that does not help."""
        target = self.target
        for path, body in (("/continue_generation", {}), ("/abort_request", {"rid": "", "abort_all": True})):
            try:
                await target.wire.post(path, body)
            except TurnoutError as fault:
                self._lost = f"the engine was lost in {culprit}: {fault}"
                return
        try:
            await target.load_version(target.versions[0])
            left = await self._left_right()
        except TurnoutError as fault:
            left = str(fault)
        self._lost = f"the engine was lost in {culprit}: {left}" if left else ""

    async def _sing(self) -> list[Reply]:
        """The canaries: a few greedy tokens whose log-probs tell which weights answer."""
        target = self.target
        return await target.together(
            [target.generate(target.prompt(99 + at, 9), CANARY_TOKENS) for at in range(CANARIES)]
        )

    def _differs(self, replies: list[Reply]) -> str:
        tolerance = self.target.facts.repeat_tolerance
        found = [difference(a, b, tolerance) for a, b in zip(self._canary, replies, strict=True)]
        worst = next((text for text in found if text), "")
        return f"other weights answer than in the beginning: {worst}" if worst else ""
