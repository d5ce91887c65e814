"""`turnout bench conformance`: the whole suite against one engine, from the engine's start to the report.

Owns the work folder with the versions that update checks load; an engine given by URL must be able to read it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import turnout.bench.checks  # noqa: F401  # pyright: ignore[reportUnusedImport] - registers the checks
from turnout.bench.checks.swaps import wanted
from turnout.bench.embedded import Nursery, nursery
from turnout.bench.facts import measured_token_s, read_facts
from turnout.bench.reference import Reference
from turnout.bench.registry import CHECKS, Outcome, chosen
from turnout.bench.report import Report
from turnout.bench.suite import Rules, Suite
from turnout.bench.target import Fresh, Target
from turnout.bench.versions import ModelVersion, changed, original
from turnout.core.ports import Clock
from turnout.core.rng import random_id
from turnout.serving.address import parse_address
from turnout.serving.exchange import Exchange

EMBEDDED = "embedded"


@dataclass(frozen=True)
class Plan:
    """What to test. `engine` is a URL or "embedded"; `model` the checkpoint folder (None: the one that the
    engine names); `flags` are further flags of an embedded engine; `only` patterns of check names; `pair` the
    URLs of a prefill and a decode engine; `token` the admin token."""

    engine: str
    model: Path | None
    work: Path
    rules: Rules
    only: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    pair: tuple[str, str] | None = None
    token: str | None = None


async def conformance(plan: Plan, clock: Clock, say: Callable[[Outcome], None]) -> Report:
    """Runs the suite; raises ConfigError for an address or a model that cannot be used, EngineError for an
    engine that cannot be started or does not answer at all."""
    checks = chosen(CHECKS, plan.only)
    if plan.engine == EMBEDDED and plan.token is None:
        plan = replace(plan, token=random_id())  # so that the guard of control calls is checked too
    async with AsyncExitStack() as stack:
        children = await stack.enter_async_context(nursery(plan.work, plan.flags, plan.token, clock))
        target = await _target(plan, clock, children, stack)
        outcomes = await Suite(target, plan.rules, say).run(checks)
    return Report(plan.engine, outcomes)


async def _target(plan: Plan, clock: Clock, children: Nursery, stack: AsyncExitStack) -> Target:
    if plan.engine == EMBEDDED:
        assert plan.model is not None
        wire = await children.start("engine", original(plan.model, "default"))
    else:
        wire = _exchange(plan.engine, "--engine", plan, stack)
    facts, folder = await read_facts(wire, plan.model)
    versions = [original(folder, facts.label)]
    versions += [changed(folder, plan.work / f"version-{at}", at) for at in (1, 2)]
    target = Target(wire, clock, facts, Reference(folder), tuple(versions), plan.work, token=plan.token)
    if plan.engine == EMBEDDED:
        target.fresh = _fresh(children)
        target.start_pair = lambda: _pair(children, target.versions[0])
    if plan.pair is not None:
        prefill, decode = plan.pair
        target.pair = (
            _exchange(prefill, "--pd-peer", plan, stack),
            _exchange(decode, "--pd-peer", plan, stack),
        )
    target.facts = replace(facts, token_s=await measured_token_s(target))
    await wanted(target, target.versions[0])  # before any check can have touched the weights
    return target


def _fresh(children: Nursery) -> Fresh:
    """Starts each version's engine once and gives the same one from then on."""
    running: dict[str, Exchange] = {}

    async def fresh(version: ModelVersion) -> Exchange:
        if version.root not in running:
            running[version.root] = await children.start(f"fresh-{len(running)}", version)
        return running[version.root]

    return fresh


async def _pair(children: Nursery, version: ModelVersion) -> tuple[Exchange, Exchange]:
    """A prefill and a decode engine on this version."""
    prefill = await children.start("prefill", version, "--disaggregation-mode", "prefill")
    return prefill, await children.start("decode", version, "--disaggregation-mode", "decode")


def _exchange(url: str, where: str, plan: Plan, stack: AsyncExitStack) -> Exchange:
    wire = Exchange(parse_address(url, where), plan.token)
    stack.push_async_callback(wire.close)
    return wire
